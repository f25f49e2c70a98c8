#include "prefix_cache.h"

#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/hash.h"

namespace stage7 {

BlockHash hash_block(BlockHash parent, std::span<const common::Token> tokens, std::uint64_t salt) {
  const std::array<std::uint64_t, 2> before = {parent, salt};
  return common::hash_bytes(std::as_bytes(tokens), common::hash_bytes(std::as_bytes(std::span(before)), 0));
}

PrefixCache::PrefixCache(int block_size, HashFunction hash) : block_size_(block_size), hash_(std::move(hash)) {}

std::vector<int> PrefixCache::find(std::span<const common::Token> tokens, std::uint64_t salt) const {
  const auto size = static_cast<std::size_t>(block_size_);
  std::vector<int> blocks;
  BlockHash hash = 0;
  TextId text = 0;
  for (; tokens.size() >= size; tokens = tokens.subspan(size)) {
    hash = hash_(hash, tokens.first(size), salt);
    const int block = find_block(hash, text, tokens.first(size), salt);
    if (block < 0) {
      break;
    }
    blocks.push_back(block);
    text = entries_.at(block).text;
  }
  return blocks;
}

void PrefixCache::publish(int block, int parent, std::span<const common::Token> tokens, std::uint64_t salt) {
  COMMON_CHECK(!contains(block), "block " + std::to_string(block) + " is published already");
  COMMON_CHECK(static_cast<int>(tokens.size()) == block_size_, "only full blocks are published");
  if (parent >= 0 && !contains(parent)) {
    return;
  }
  Entry entry;
  entry.hash = hash_(parent < 0 ? 0 : entries_.at(parent).hash, tokens, salt);
  entry.parent_text = parent < 0 ? 0 : entries_.at(parent).text;
  const int same = find_block(entry.hash, entry.parent_text, tokens, salt);
  entry.text = same < 0 ? ++last_text_ : entries_.at(same).text;
  entry.salt = salt;
  try {
    // Everything that may throw comes first: if memory runs out, the block stays unpublished.
    entry.tokens.assign(tokens.begin(), tokens.end());
    std::vector<int>& same_hash = blocks_with_hash_[entry.hash];
    same_hash.reserve(same_hash.size() + 1);
    std::list<int> node = {block};
    entry.position = node.begin();
    entries_[block] = std::move(entry);
    in_use_.splice(in_use_.end(), node);
    same_hash.push_back(block);
  } catch (const std::bad_alloc&) {  // an unpublished text is computed again: no reason to fail
  }
}

void PrefixCache::make_evictable(int block) {
  COMMON_CHECK(contains(block), "block " + std::to_string(block) + " is not published");
  Entry& entry = entries_.at(block);
  COMMON_CHECK(!entry.is_evictable, "block " + std::to_string(block) + " is evictable already");
  entry.is_evictable = true;
  evictable_.splice(evictable_.end(), in_use_, entry.position);
}

void PrefixCache::reacquire(int block) {
  COMMON_CHECK(contains(block), "block " + std::to_string(block) + " is not published");
  Entry& entry = entries_.at(block);
  COMMON_CHECK(entry.is_evictable, "block " + std::to_string(block) + " is in use");
  entry.is_evictable = false;
  in_use_.splice(in_use_.end(), evictable_, entry.position);
}

int PrefixCache::evict() {
  COMMON_CHECK(!evictable_.empty(), "no block can be evicted");
  const int block = evictable_.front();
  evictable_.pop_front();
  forget(block);
  statistics_.evictions += 1;
  return block;
}

std::vector<int> PrefixCache::reset() {
  std::vector<int> blocks(evictable_.begin(), evictable_.end());
  entries_.clear();
  blocks_with_hash_.clear();
  evictable_.clear();
  in_use_.clear();
  return blocks;
}

void PrefixCache::count_lookup(std::size_t num_blocks) {
  statistics_.lookups += 1;
  statistics_.hits += num_blocks > 0 ? 1 : 0;
  statistics_.tokens_saved += static_cast<std::int64_t>(num_blocks) * block_size_;
}

int PrefixCache::find_block(BlockHash hash, TextId parent_text, std::span<const common::Token> tokens,
                            std::uint64_t salt) const {
  const auto candidates = blocks_with_hash_.find(hash);
  if (candidates == blocks_with_hash_.end()) {
    return -1;
  }
  const auto same = std::find_if(candidates->second.begin(), candidates->second.end(), [&](int block) {
    const Entry& entry = entries_.at(block);
    return entry.parent_text == parent_text && entry.salt == salt &&
           std::equal(entry.tokens.begin(), entry.tokens.end(), tokens.begin(), tokens.end());
  });
  return same == candidates->second.end() ? -1 : *same;
}

void PrefixCache::forget(int block) {
  const auto entry = entries_.find(block);
  const auto same_hash = blocks_with_hash_.find(entry->second.hash);
  std::erase(same_hash->second, block);
  if (same_hash->second.empty()) {
    blocks_with_hash_.erase(same_hash);
  }
  entries_.erase(entry);
}

}  // namespace
