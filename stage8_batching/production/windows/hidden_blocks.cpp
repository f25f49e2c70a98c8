#include "hidden_blocks.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "block_ownership.h"

namespace stage8 {

int num_hidden_blocks(int length, int window, int block_size) {
  const int first_seen = length - window + 1;  // by the next query, whose position is the length
  return std::max(0, std::min(first_seen / block_size, length / block_size - 1));
}

int free_hidden_blocks(KvCacheManager& manager, SequenceId sequence, int window, int num_unpublished, int stand_in) {
  const int num_hidden = num_hidden_blocks(manager.length(sequence) - num_unpublished, window, manager.block_size());
  const std::vector<int>& table = manager.block_table(sequence);
  if (table.size() > 1 && table[0] == table[1]) {  // no other block is in a table twice
    stand_in = table[0];
  }
  const bool is_new = stand_in < 0;
  if (num_hidden < (is_new ? 2 : 1) || (is_new && num_available(manager) == 0)) {
    return stand_in;
  }
  const HeldBlocks held(manager, is_new ? 1 : 0);  // until it has its places
  if (is_new) {
    stand_in = held.front();
  }
  // From the end, as in free(): the last block is the first to be evicted.
  for (int i = num_hidden - 1; i >= 0 && table[static_cast<std::size_t>(i)] != stand_in; --i) {
    replace_block(manager, sequence, i, stand_in);
  }
  return stand_in;
}

}  // namespace
