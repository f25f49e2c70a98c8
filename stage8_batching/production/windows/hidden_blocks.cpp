#include "hidden_blocks.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "common/base/check.h"

namespace stage8 {
namespace {

constexpr SequenceId kHolder = -1;  // of a new block, until it has its places; engines number from 0

// Names members that a class derived from the manager may use. A pointer to one serves for every manager.
struct ManagerMembers : KvCacheManager {
  static constexpr auto kSequences = &ManagerMembers::sequences_;
  static constexpr auto kReferenceCounts = &ManagerMembers::reference_counts_;
  static constexpr auto kReleaseBlock = &ManagerMembers::release_block;
};

}  // namespace

int num_hidden_blocks(int length, int window, int block_size) {
  const int first_seen = length - window + 1;  // by the next query, whose position is the length
  return std::max(0, std::min(first_seen / block_size, length / block_size - 1));
}

void replace_block(KvCacheManager& manager, SequenceId sequence, int index, int stand_in) {
  const int num_full = manager.length(sequence) / manager.block_size();
  COMMON_CHECK(index >= 0 && index < num_full, "a block that is not full is written to");
  COMMON_CHECK(manager.reference_count(stand_in) > 0, "a block that stands in has an owner");
  std::vector<int>& table = (manager.*ManagerMembers::kSequences).at(sequence).block_table;
  (manager.*ManagerMembers::kReferenceCounts)[static_cast<std::size_t>(stand_in)] += 1;
  (manager.*ManagerMembers::kReleaseBlock)(std::exchange(table[static_cast<std::size_t>(index)], stand_in));
}

int free_hidden_blocks(KvCacheManager& manager, SequenceId sequence, int window, int num_unpublished, int stand_in) {
  const int num_hidden = num_hidden_blocks(manager.length(sequence) - num_unpublished, window, manager.block_size());
  const std::vector<int>& table = manager.block_table(sequence);
  if (table.size() > 1 && table[0] == table[1]) {  // no other block is in a table twice
    stand_in = table[0];
  }
  const bool is_new = stand_in < 0;
  if (num_hidden < (is_new ? 2 : 1) || (is_new && !manager.allocate(kHolder, 1))) {
    return stand_in;
  }
  if (is_new) {
    stand_in = manager.block_table(kHolder)[0];
  }
  // From the end, as in free(): the last block is the first to be evicted.
  for (int i = num_hidden - 1; i >= 0 && table[static_cast<std::size_t>(i)] != stand_in; --i) {
    replace_block(manager, sequence, i, stand_in);
  }
  if (is_new) {
    manager.free(kHolder);
  }
  return stand_in;
}

}  // namespace
