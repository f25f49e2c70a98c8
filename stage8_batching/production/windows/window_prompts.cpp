#include "window_prompts.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "hidden_blocks.h"

namespace stage8 {
namespace {

using TextId = PrefixCache::TextId;

// The published blocks by the text before.
class BlocksByParent {
 public:
  BlocksByParent(const PrefixCache& pool, int num_blocks) : pool_(pool) {
    for (int block = 0; block < num_blocks; ++block) {
      if (pool.contains(block)) {
        blocks_.emplace(pool.entry(block).parent_text, block);
      }
    }
  }

  // Adds the numbers of the texts that go on with these tokens after the text `parent`. Returns a block with one of
  // them, or -1.
  int find(TextId parent, std::span<const common::Token> tokens, std::uint64_t salt, std::set<TextId>& found) const {
    int result = -1;
    const auto [begin, end] = blocks_.equal_range(parent);
    std::for_each(begin, end, [&](const auto& child) {
      const PrefixCache::Entry& entry = pool_.entry(child.second);
      if (entry.salt == salt && std::equal(entry.tokens.begin(), entry.tokens.end(), tokens.begin(), tokens.end())) {
        found.insert(entry.text);
        result = child.second;
      }
    });
    return result;
  }

 private:
  const PrefixCache& pool_;
  std::unordered_multimap<TextId, int> blocks_;
};

// The blocks of the beginning of these tokens, as far as their text is known; -1: it is not cached.
FoundBlocks find_known(const KvCacheManager& manager, const EvictedTexts& evicted,
                       std::span<const common::Token> tokens, std::uint64_t salt) {
  const PrefixCache& pool = manager.prefix_cache();
  const std::vector<int> hits = pool.find(tokens, salt);
  if (evicted.size() == 0) {
    return {hits, hits.size()};
  }
  const auto block_size = static_cast<std::size_t>(manager.block_size());
  std::vector<int> blocks;
  std::set<TextId> texts = {0};  // the numbers of the text so far
  // Needed only behind a text that was evicted: find() has all that is cached behind its own hits.
  std::optional<BlocksByParent> cached;
  for (; !texts.empty() && tokens.size() >= block_size; tokens = tokens.subspan(block_size)) {
    const std::span<const common::Token> next = tokens.first(block_size);
    const std::size_t index = blocks.size();
    std::set<TextId> longer;
    blocks.push_back(index < hits.size() ? hits[index] : -1);
    if (index < hits.size()) {
      longer.insert(pool.entry(hits[index]).text);
    }
    for (const TextId text : texts) {
      const int other = cached.has_value() ? cached->find(text, next, salt, longer) : -1;
      blocks.back() = blocks.back() >= 0 ? blocks.back() : other;
    }
    const std::size_t num_cached = longer.size();
    for (const TextId text : texts) {
      evicted.find(text, next, salt, longer);
    }
    if (longer.size() > num_cached && !cached.has_value()) {
      cached.emplace(pool, evicted.num_blocks());
    }
    texts = std::move(longer);
  }
  return {std::move(blocks), hits.size()};
}

}  // namespace

FoundBlocks find_window(const KvCacheManager& manager, const EvictedTexts& evicted,
                        std::span<const common::Token> tokens, std::uint64_t salt, int window) {
  const auto num_hidden = [&](std::size_t num_blocks) {
    return num_hidden_blocks(static_cast<int>(num_blocks) * manager.block_size(), window, manager.block_size());
  };
  FoundBlocks found = find_known(manager, evicted, tokens, salt);
  std::vector<int>& blocks = found.blocks;
  std::size_t num_usable = 0;
  int first = 0;  // of the cached blocks, one after the other, that end here
  for (std::size_t count = 1; count <= blocks.size(); ++count) {
    first = blocks[count - 1] >= 0 ? first : static_cast<int>(count);
    num_usable = first <= num_hidden(count) ? count : num_usable;
  }
  blocks.resize(num_usable);
  if (const int places = num_hidden(num_usable); places > 1) {
    std::fill_n(blocks.begin(), places, -1);
  }
  return found;
}

}  // namespace
