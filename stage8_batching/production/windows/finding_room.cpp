#include "finding_room.h"

#include <algorithm>
#include <cstddef>

namespace stage8 {

int num_available(const KvCacheManager& manager) {
  return static_cast<int>(manager.free_blocks().size() + manager.prefix_cache().evictable().size());
}

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

}  // namespace
