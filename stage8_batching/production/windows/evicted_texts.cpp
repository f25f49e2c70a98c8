#include "evicted_texts.h"

#include <algorithm>
#include <new>
#include <unordered_set>

#include "../host_cache/text_link.h"

namespace stage8 {
namespace {

std::uint64_t hash_of(PrefixCache::TextId parent, std::span<const common::Token> tokens, std::uint64_t salt) {
  return hash_block(static_cast<BlockHash>(parent), tokens, salt);
}

}  // namespace

void EvictedTexts::add(const PrefixCache& pool, int block) noexcept {
  try {
    if (num_added_++ == num_cached()) {
      num_added_ = 0;
      forget_useless(pool);
    }
    const TextId evicted = pool.entry(block).text;
    const TextLink link = link_of(pool, block);
    const std::uint64_t hash = hash_of(link.parent, link.tokens, link.salt);
    const auto [begin, end] = texts_.equal_range(hash);
    const bool is_known = std::any_of(begin, end, [&](const auto& entry) { return entry.second.text == evicted; });
    if (!is_known && texts_.size() < static_cast<std::size_t>(num_cached()) * kMaxPerBlock) {
      texts_.emplace(hash, Text{evicted, link.parent, {link.tokens.begin(), link.tokens.end()}, link.salt});
    }
  } catch (const std::bad_alloc&) {  // a text that is not found is computed again: no reason to fail
  }
}

void EvictedTexts::find(TextId parent, std::span<const common::Token> tokens, std::uint64_t salt,
                        std::set<TextId>& found) const {
  salt = parent == 0 ? salt : 0;
  const auto [begin, end] = texts_.equal_range(hash_of(parent, tokens, salt));
  std::for_each(begin, end, [&](const auto& entry) {
    const Text& text = entry.second;
    if (text.parent == parent && text.salt == salt &&
        std::equal(text.tokens.begin(), text.tokens.end(), tokens.begin(), tokens.end())) {
      found.insert(text.text);
    }
  });
}

void EvictedTexts::forget_useless(const PrefixCache& pool) {
  std::unordered_map<TextId, TextId> parents;
  for (const auto& [hash, text] : texts_) {
    parents[text.text] = text.parent;
  }
  std::unordered_set<TextId> needed;
  const auto need = [&](TextId text) {
    // Up to a text that is still cached, or that another block has led to: what stands before it is needed anyway.
    while (parents.contains(text) && needed.insert(text).second) {
      text = parents.at(text);
    }
  };
  for (int block = 0; block < num_blocks_; ++block) {
    if (pool.contains(block)) {
      need(link_of(pool, block).parent);
    }
  }
  if (tier_ != nullptr) {
    for (const int block : tier_->in_use()) {
      need(tier_->parent(block));
    }
  }
  std::erase_if(texts_, [&](const auto& entry) { return !needed.contains(entry.second.text); });
}

}  // namespace
