// What a cached block's text is: some tokens, behind another text. PrefixCache publishes a block behind another block,
// and so it knows both. A block that comes back from the host may follow a text of which the pool has no block, where
// no query sees that (../windows/window_prompts.h). It is published behind kNoBlock, with the number of the text before
// in place of the salt. No prompt has kNoBlock's tokens, and so the lesson's lookup does not find it.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "../../prefix_cache.h"

namespace stage8 {

inline constexpr int kNoBlock = std::numeric_limits<int>::max();
inline constexpr common::Token kNoToken = -1;

struct TextLink {
  PrefixCache::TextId parent = 0;  // 0: it is the first block
  std::span<const common::Token> tokens;
  std::uint64_t salt = 0;  // of a first block; others have that of the text before
};

// Of a published block.
inline TextLink link_of(const PrefixCache& pool, int block) {
  const PrefixCache::Entry& entry = pool.entry(block);
  const bool is_alone = pool.contains(kNoBlock) && entry.parent_text == pool.entry(kNoBlock).text;
  const PrefixCache::TextId parent = is_alone ? static_cast<PrefixCache::TextId>(entry.salt) : entry.parent_text;
  return {parent, entry.tokens, parent == 0 ? entry.salt : 0};
}

}  // namespace
