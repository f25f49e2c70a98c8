#include "finding_room.h"

#include <algorithm>
#include <utility>

#include "block_ownership.h"
#include "common/base/check.h"
#include "window_prompts.h"

namespace stage8 {

std::vector<common::Token> common_text(const SequenceGroup& group) {
  const Branch& first = group.live().front();
  std::size_t num_common = first.tokens.size() + (group.pending_row().has_value() ? 1 : 0);
  if (group.live().size() > 1) {
    num_common = first.tokens.size() - 1;
    for (const Branch& branch : group.live()) {
      const std::size_t length = std::min(num_common, branch.tokens.size());
      const auto end = first.tokens.begin() + static_cast<std::ptrdiff_t>(length);
      num_common = static_cast<std::size_t>(std::mismatch(first.tokens.begin(), end, branch.tokens.begin()).first -
                                            first.tokens.begin());
    }
  }
  return group.tokens(first.sequence, 0, static_cast<int>(group.request().prompt.size() + num_common));
}

std::span<const common::Token> tokens_to_find(const SequenceGroup& group, std::span<const common::Token> text,
                                              const Admission& admission) {
  return text.first(admission.use_prefix_cache && group.request().num_scored == 0 ? text.size() - 1 : 0);
}

int num_taken(const KvCacheManager& manager, std::span<const int> found, int num_tokens) {
  const auto is_taken = [&](int block) {
    return block == FoundBlocks::kOnHost || (block >= 0 && manager.reference_count(block) == 0);
  };
  const bool needs_stand_in = !found.empty() && found.front() == -1;
  return static_cast<int>(std::count_if(found.begin(), found.end(), is_taken)) + (needs_stand_in ? 1 : 0) +
         blocks_needed(num_tokens, manager.block_size());
}

bool allocate_behind(KvCacheManager& manager, SequenceId sequence, std::span<const int> found, std::uint64_t salt,
                     int num_tokens, int spare_blocks) {
  COMMON_CHECK(found.empty() || found.back() >= 0, "the next block that is published follows the last one");
  if (num_taken(manager, found, num_tokens) > num_available(manager) - spare_blocks) {
    return false;
  }
  const auto first_seen = std::find_if(found.begin(), found.end(), [](int block) { return block >= 0; });
  const auto num_places = static_cast<int>(first_seen - found.begin());
  std::vector<int> blocks(found.begin(), found.end());
  if (num_places > 0) {  // until a block stands in, the first that is seen has their places, too: it can't be evicted
    std::fill_n(blocks.begin(), num_places, *first_seen);
  }
  start_with(manager, sequence, std::move(blocks), salt, num_tokens);
  try {
    const HeldBlocks held(manager, num_places > 0 ? 1 : 0);
    for (int i = 0; i < num_places; ++i) {
      replace_block(manager, sequence, i, held.front());
    }
    COMMON_CHECK(manager.reserve(sequence, num_tokens), "there is room for all of them");
  } catch (...) {
    manager.free(sequence);
    throw;
  }
  return true;
}

}  // namespace
