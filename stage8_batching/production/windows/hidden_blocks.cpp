#include "hidden_blocks.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace stage8 {
namespace {

constexpr SequenceId kHolder = -1;  // of a new block, until it has its places; engines number from 0

}  // namespace

int num_hidden_blocks(int length, int window, int block_size) {
  const int first_seen = length - window + 1;  // by the next query, whose position is the length
  return std::max(0, std::min(first_seen / block_size, length / block_size - 1));
}

void free_hidden_blocks(KvCacheManager& manager, SequenceId sequence, int window, int num_unpublished) {
  const int num_hidden = num_hidden_blocks(manager.length(sequence) - num_unpublished, window, manager.block_size());
  if (num_hidden < 2) {
    return;
  }
  const std::vector<int>& table = manager.block_table(sequence);
  const bool has_stand_in = table[0] == table[1];  // no other block is in a table twice
  if (!has_stand_in && !manager.allocate(kHolder, 1)) {
    return;
  }
  const int stand_in = has_stand_in ? table[0] : manager.block_table(kHolder)[0];
  // From the end, as in free(): the last block is the first to be evicted.
  for (int i = num_hidden - 1; i >= 0 && table[static_cast<std::size_t>(i)] != stand_in; --i) {
    manager.replace_block(sequence, i, stand_in);
  }
  if (!has_stand_in) {
    manager.free(kHolder);
  }
}

}  // namespace
