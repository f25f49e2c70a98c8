#include "block_ownership.h"

#include <cstddef>
#include <type_traits>
#include <utility>

#include "common/base/check.h"

namespace stage8 {
namespace {

// Names members that a class derived from the manager may use. A pointer to one serves for every manager.
struct ManagerMembers : KvCacheManager {
  static constexpr auto kSequences = &ManagerMembers::sequences_;
  static constexpr auto kReferenceCounts = &ManagerMembers::reference_counts_;
  static constexpr auto kPrefixCache = &ManagerMembers::prefix_cache_;
  static constexpr auto kReleaseBlock = &ManagerMembers::release_block;
};

}  // namespace

int num_available(const KvCacheManager& manager) {
  return static_cast<int>(manager.free_blocks().size() + manager.prefix_cache().evictable().size());
}

HeldBlocks::HeldBlocks(KvCacheManager& manager, int num_blocks) : manager_(manager), is_holding_(num_blocks > 0) {
  COMMON_CHECK(!is_holding_ || manager.allocate(kHolder, num_blocks * manager.block_size()),
               "so many blocks have no owner");
}

HeldBlocks::~HeldBlocks() {
  if (is_holding_) {
    manager_.free(kHolder);
  }
}

KeptBlocks::KeptBlocks(KvCacheManager& manager, std::vector<int> blocks)
    : manager_(manager), blocks_(std::move(blocks)) {
  for (const int block : blocks_) {
    if ((manager_.*ManagerMembers::kReferenceCounts)[static_cast<std::size_t>(block)]++ == 0) {
      (manager_.*ManagerMembers::kPrefixCache).reacquire(block);
    }
  }
}

KeptBlocks::~KeptBlocks() {
  for (const int block : blocks_) {
    (manager_.*ManagerMembers::kReleaseBlock)(block);
  }
}

void publish_block(KvCacheManager& manager, int block, int parent, std::span<const common::Token> tokens,
                   std::uint64_t salt) {
  (manager.*ManagerMembers::kPrefixCache).publish(block, parent, tokens, salt);
}

void replace_block(KvCacheManager& manager, SequenceId sequence, int index, int stand_in) {
  const int num_full = manager.length(sequence) / manager.block_size();
  COMMON_CHECK(index >= 0 && index < num_full, "a block that is not full is written to");
  COMMON_CHECK(manager.reference_count(stand_in) > 0, "a block that stands in has an owner");
  std::vector<int>& table = (manager.*ManagerMembers::kSequences).at(sequence).block_table;
  (manager.*ManagerMembers::kReferenceCounts)[static_cast<std::size_t>(stand_in)] += 1;
  (manager.*ManagerMembers::kReleaseBlock)(std::exchange(table[static_cast<std::size_t>(index)], stand_in));
}

void start_with(KvCacheManager& manager, SequenceId sequence, std::vector<int> blocks, std::uint64_t salt,
                int num_tokens) {
  COMMON_CHECK(!manager.contains(sequence) && !manager.is_swapped(sequence), "the sequence is live already");
  const auto num_blocks = blocks.size();
  const int length = static_cast<int>(num_blocks) * manager.block_size();
  // Everything that may throw comes first: if memory runs out, nothing has changed.
  auto& sequences = manager.*ManagerMembers::kSequences;
  typename std::remove_reference_t<decltype(sequences)>::mapped_type owner = {
      std::move(blocks), length, length, {}, salt};
  owner.block_table.reserve(num_blocks + static_cast<std::size_t>(blocks_needed(num_tokens, manager.block_size())));
  owner.tail.reserve(static_cast<std::size_t>(manager.block_size()));
  PrefixCache& cache = manager.*ManagerMembers::kPrefixCache;
  const std::vector<int>& table = (sequences[sequence] = std::move(owner)).block_table;
  for (const int block : table) {
    if ((manager.*ManagerMembers::kReferenceCounts)[static_cast<std::size_t>(block)]++ == 0) {
      cache.reacquire(block);
    }
  }
}

void count_lookup(KvCacheManager& manager, std::size_t num_blocks) {
  (manager.*ManagerMembers::kPrefixCache).count_lookup(num_blocks);
}

}  // namespace
