#include "host_cache.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#include "common/base/check.h"
#include "text_link.h"

namespace stage8 {

HostCache::HostCache(int first_block, int num_blocks, int block_size, int num_there)
    : first_block_(first_block), block_size_(block_size), entries_(static_cast<std::size_t>(num_blocks)) {
  COMMON_CHECK(num_blocks > 0, "the host's tier has no blocks");
  for (int block = first_block; block < first_block + num_blocks; ++block) {
    entry(block).position = missing_.insert(missing_.end(), block);
  }
  grow(num_there);
}

void HostCache::grow(int num_there) noexcept {
  while (!missing_.empty() && missing_.front() < first_block_ + num_there) {
    free_.splice(free_.end(), missing_, missing_.begin());
  }
}

void HostCache::store(const PrefixCache& pool, int block,
                      const std::function<bool(int host_block)>& lacks_part) noexcept {
  try {
    const auto must_stay = [&](int host_block) {
      return lacks_part && std::any_of(pending_copies_.begin(), pending_copies_.end(),
                                       [&](const BlockCopy& copy) { return copy.source == host_block; });
    };
    const TextLink evicted = link_of(pool, block);
    if (const int same = find_child(evicted.parent, evicted.tokens, evicted.salt); same >= 0) {
      if (lacks_part && lacks_part(same) && !must_stay(same)) {
        pending_copies_.push_back({block, same});
      }
      use(same);
      renumber(same, pool.entry(block).text);
      return;
    }
    // Everything that may throw comes first: if memory runs out, the place stays free.
    pending_copies_.reserve(pending_copies_.size() + 1);
    if (free_.empty() && (in_use_.empty() || must_stay(in_use_.front()))) {
      return;
    }
    if (free_.empty()) {
      evict();
    }
    const int host_block = free_.front();
    Entry& place = entry(host_block);
    place.tokens.assign(evicted.tokens.begin(), evicted.tokens.end());
    children_[evicted.parent].emplace(hash_block(0, evicted.tokens, evicted.salt), host_block);
    place.text = pool.entry(block).text;
    place.parent = evicted.parent;
    place.salt = evicted.salt;
    in_use_.splice(in_use_.end(), free_, place.position);
    pending_copies_.push_back({block, host_block});
    statistics_.stored += 1;
  } catch (const std::bad_alloc&) {  // a text that is lost is computed again: no reason to fail
  }
}

std::vector<int> HostCache::find(std::int64_t parent, std::span<const common::Token> tokens, std::uint64_t salt) const {
  const auto size = static_cast<std::size_t>(block_size_);
  std::vector<int> blocks;
  for (; tokens.size() >= size; tokens = tokens.subspan(size)) {
    const int block = find_child(parent, tokens.first(size), salt);
    if (block < 0) {
      break;
    }
    blocks.push_back(block);
    parent = entry(block).text;
  }
  return blocks;
}

void HostCache::touch(const PrefixCache& pool, std::span<const common::Token> tokens, std::uint64_t salt) {
  const std::vector<int> hits = pool.find(tokens, salt);
  const auto rest = tokens.subspan(hits.size() * static_cast<std::size_t>(block_size_));
  const std::vector<int> blocks = find(hits.empty() ? 0 : pool.entry(hits.back()).text, rest, salt);
  touch(blocks);
}

void HostCache::touch(std::span<const int> blocks) {
  std::for_each(blocks.rbegin(), blocks.rend(), [&](int block) { use(block); });  // the deepest is evicted first
}

void HostCache::bring_back(std::span<const BlockCopy> copies) {
  pending_copies_.insert(pending_copies_.end(), copies.begin(), copies.end());
  statistics_.restored += static_cast<std::int64_t>(copies.size());
  statistics_.hits += 1;
}

void HostCache::restore(KvCacheManager& manager, SequenceId sequence, std::span<const common::Token> tokens,
                        std::uint64_t salt, const Admission& admission, const NumUsable& num_usable) {
  const PrefixCache& pool = manager.prefix_cache();
  const int first = manager.length(sequence) / block_size_;  // what the pool had are whole blocks
  const std::int64_t parent =
      first == 0 ? 0 : pool.entry(manager.block_table(sequence)[static_cast<std::size_t>(first - 1)]).text;
  // At least one token is left to compute, as in the pool.
  std::vector<int> found = find(parent, tokens.first(tokens.size() - 1), salt);
  const int num_spare =
      static_cast<int>(manager.free_blocks().size() + pool.evictable().size()) - admission.spare_blocks;
  const auto fits = [&](std::size_t num_blocks) {
    const int restored = static_cast<int>(num_blocks) * block_size_;
    const int computed = std::min(admission.max_tokens, static_cast<int>(tokens.size()) - restored);
    const int missing = restored + computed - (manager.capacity(sequence) - manager.length(sequence));
    return blocks_needed(std::max(missing, 0), block_size_) <= num_spare;
  };
  while (!found.empty() && !fits(found.size())) {
    found.pop_back();
  }
  found.resize(num_usable ? num_usable(found) : found.size());
  if (found.empty() || !manager.reserve(sequence, static_cast<int>(found.size()) * block_size_)) {
    return;
  }
  // What the pool has evicted for it may have taken the place of some.
  const std::size_t num_reserved = found.size();
  found = find(parent, tokens.first(num_reserved * static_cast<std::size_t>(block_size_)), salt);
  found.resize(num_usable ? num_usable(found) : found.size());
  pending_copies_.reserve(pending_copies_.size() + found.size());
  const std::span<const int> blocks =
      std::span(manager.block_table(sequence)).subspan(static_cast<std::size_t>(first), found.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    pending_copies_.push_back({found[i], blocks[i]});
  }
  manager.commit(sequence, tokens.first(found.size() * static_cast<std::size_t>(block_size_)));
  if (found.size() < num_reserved) {
    manager.release_reserved(sequence);
  }
  statistics_.restored += static_cast<std::int64_t>(found.size());
  statistics_.hits += found.empty() ? 0 : 1;
  for (std::size_t i = found.size(); i-- > 0;) {
    use(found[i]);
  }
  for (std::size_t i = 0; i < found.size() && pool.contains(blocks[i]); ++i) {
    renumber(found[i], pool.entry(blocks[i]).text);
  }
}

void HostCache::clear_pending_copies(std::size_t count) {
  pending_copies_.erase(pending_copies_.begin(), pending_copies_.begin() + static_cast<std::ptrdiff_t>(count));
}

void HostCache::take_over_copies(KvCacheManager& manager) {
  const std::span<const BlockCopy> copies = manager.pending_copies();
  pending_copies_.insert(pending_copies_.end(), copies.begin(), copies.end());
  manager.clear_pending_copies();
}

int HostCache::find_child(std::int64_t parent, std::span<const common::Token> tokens, std::uint64_t salt) const {
  const auto children = children_.find(parent);
  if (children == children_.end()) {
    return -1;
  }
  salt = parent == 0 ? salt : 0;  // as in a TextLink
  const auto [begin, end] = children->second.equal_range(hash_block(0, tokens, salt));
  const auto same = std::find_if(begin, end, [&](const auto& child) {
    const Entry& candidate = entry(child.second);
    return candidate.salt == salt &&
           std::equal(candidate.tokens.begin(), candidate.tokens.end(), tokens.begin(), tokens.end());
  });
  return same == end ? -1 : same->second;
}

void HostCache::renumber(int block, std::int64_t text) {
  const std::int64_t before = entry(block).text;
  if (before == text) {
    return;
  }
  if (children_.contains(before)) {
    Children& now = children_[text];
    Children& children = children_.at(before);
    now.reserve(now.size() + children.size());
    for (const auto& [hash, child] : children) {
      entry(child).parent = text;
    }
    now.merge(children);
    children_.erase(before);
  }
  entry(block).text = text;
}

void HostCache::evict() {
  const int block = in_use_.front();
  Entry& place = entry(block);
  const auto children = children_.find(place.parent);
  const auto [begin, end] = children->second.equal_range(hash_block(0, place.tokens, place.salt));
  children->second.erase(std::find_if(begin, end, [&](const auto& child) { return child.second == block; }));
  if (children->second.empty()) {
    children_.erase(children);
  }
  free_.splice(free_.end(), in_use_, place.position);
  statistics_.evictions += 1;
}

}  // namespace
