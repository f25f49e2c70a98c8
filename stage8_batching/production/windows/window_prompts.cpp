#include "window_prompts.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "../host_cache/text_link.h"
#include "block_ownership.h"
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
        blocks_.emplace(link_of(pool, block).parent, block);
      }
    }
  }

  // Adds the numbers of the texts that go on with these tokens after the text `parent`. Returns a block with one of
  // them, or -1.
  int find(TextId parent, std::span<const common::Token> tokens, std::uint64_t salt, std::set<TextId>& found) const {
    int result = -1;
    const auto [begin, end] = blocks_.equal_range(parent);
    std::for_each(begin, end, [&](const auto& child) {
      const TextLink link = link_of(pool_, child.second);
      if ((parent != 0 || link.salt == salt) &&
          std::equal(link.tokens.begin(), link.tokens.end(), tokens.begin(), tokens.end())) {
        found.insert(pool_.entry(child.second).text);
        result = child.second;
      }
    });
    return result;
  }

 private:
  const PrefixCache& pool_;
  std::unordered_multimap<TextId, int> blocks_;
};

// The blocks of the beginning of a text, as far as it is known; -1: not there.
struct KnownBlocks {
  std::vector<int> in_pool;
  std::vector<int> on_host;  // as many

  bool is_cached(std::size_t index) const { return in_pool[index] >= 0 || on_host[index] >= 0; }
};

KnownBlocks find_known(const KvCacheManager& manager, const EvictedTexts& evicted,
                       std::span<const common::Token> tokens, std::uint64_t salt, const HostCache* tier) {
  const PrefixCache& pool = manager.prefix_cache();
  const std::vector<int> hits = pool.find(tokens, salt);
  if (evicted.size() == 0 && (tier == nullptr || tier->num_used() == 0)) {
    return {hits, std::vector<int>(hits.size(), -1)};
  }
  const auto block_size = static_cast<std::size_t>(manager.block_size());
  std::vector<int> blocks;
  std::vector<int> on_host;
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
    on_host.push_back(-1);
    if (tier != nullptr) {
      for (const TextId text : texts) {
        if (const std::vector<int> found = tier->find(text, next, salt); !found.empty()) {
          on_host.back() = found.front();
          longer.insert(tier->text(found.front()));
        }
      }
    }
    if (longer.size() > num_cached && !cached.has_value()) {
      cached.emplace(pool, evicted.num_blocks());
    }
    texts = std::move(longer);
  }
  return {std::move(blocks), std::move(on_host)};
}

}  // namespace

FoundBlocks find_window(const KvCacheManager& manager, const EvictedTexts& evicted,
                        std::span<const common::Token> tokens, std::uint64_t salt, int window, const HostCache* tier) {
  const auto num_hidden = [&](std::size_t num_blocks) {
    return num_hidden_blocks(static_cast<int>(num_blocks) * manager.block_size(), window, manager.block_size());
  };
  const KnownBlocks known = find_known(manager, evicted, tokens, salt, tier);
  FoundBlocks found;
  std::vector<int>& blocks = found.blocks;
  blocks = known.in_pool;
  std::size_t num_usable = 0;
  int first = 0;  // of the cached blocks, one after the other, that end here
  for (std::size_t count = 1; count <= blocks.size(); ++count) {
    first = known.is_cached(count - 1) ? first : static_cast<int>(count);
    num_usable = first <= num_hidden(count) ? count : num_usable;
    found.num_first += found.num_first + 1 == count && known.is_cached(count - 1) ? 1 : 0;
  }
  blocks.resize(num_usable);
  const int places = num_hidden(num_usable);
  found.before = places > 0 ? blocks[static_cast<std::size_t>(places - 1)] : -1;
  if (places > 1) {
    std::fill_n(blocks.begin(), places, -1);
  }
  for (auto index = static_cast<std::size_t>(places); index < num_usable; ++index) {
    if (blocks[index] < 0) {
      blocks[index] = FoundBlocks::kOnHost;
      found.host_blocks.push_back(known.on_host[index]);
    }
  }
  return found;
}

bool bring_back(KvCacheManager& manager, const EvictedTexts& evicted, HostCache& tier, FoundBlocks& found,
                std::span<const common::Token> tokens, std::uint64_t salt, int window) {
  std::vector<int> in_pool;
  std::copy_if(found.blocks.begin(), found.blocks.end(), std::back_inserter(in_pool),
               [](int block) { return block >= 0; });
  const KeptBlocks kept(manager, std::move(in_pool));
  const HeldBlocks held(manager, static_cast<int>(found.host_blocks.size()));
  const FoundBlocks again = find_window(manager, evicted, tokens, salt, window, &tier);
  if (again.blocks != found.blocks || again.host_blocks != found.host_blocks) {
    return false;
  }
  const auto block_size = static_cast<std::size_t>(manager.block_size());
  const PrefixCache& pool = manager.prefix_cache();
  if (!pool.contains(kNoBlock)) {
    publish_block(manager, kNoBlock, -1, std::vector<common::Token>(block_size, kNoToken), 0);
  }
  std::vector<BlockCopy> copies;
  for (std::size_t i = 0; i < found.host_blocks.size(); ++i) {
    copies.push_back({found.host_blocks[i], held.blocks()[i]});
  }
  tier.bring_back(copies);
  auto copy = copies.begin();
  int before = again.before;
  for (std::size_t i = 0; i < found.blocks.size(); ++i) {
    int& block = found.blocks[i];
    if (block == FoundBlocks::kOnHost) {
      block = copy->destination;
      const bool is_alone = i > 0 && before < 0;
      publish_block(manager, block, is_alone ? kNoBlock : before, tokens.subspan(i * block_size, block_size),
                    is_alone ? static_cast<std::uint64_t>(tier.parent(copy->source)) : salt);
      if (!pool.contains(block)) {
        return false;
      }
      ++copy;
    }
    before = block >= 0 ? block : before;
  }
  return true;
}

}  // namespace
