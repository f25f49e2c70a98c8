#include "local_pool.h"

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "common/base/check.h"

namespace stage8 {
namespace {

// Calls visit(block, is_new) for each block that a window reaches. is_new: none of its tokens is in the cache yet.
template <typename Visit>
void visit_windows(const KvCacheManager& manager, int window, const Visit& visit) {
  const int block_size = manager.block_size();
  for (const SequenceId sequence : manager.sequences()) {
    if (sequence < 0) {  // none of the engine's
      continue;
    }
    const int length = manager.length(sequence);
    const std::vector<int>& table = manager.block_table(sequence);
    const int num_filled = blocks_needed(length, block_size);
    for (int i = std::max(0, length + 1 - window) / block_size; i < static_cast<int>(table.size()); ++i) {
      visit(table[static_cast<std::size_t>(i)], i >= num_filled);
    }
  }
}

std::set<int> destinations(std::span<const BlockCopy> copies) {
  std::set<int> result;
  for (const auto& [source, destination] : copies) {
    result.insert(destination);
  }
  return result;
}

}  // namespace

LocalPool::LocalPool(const LocalPoolSize& size)
    : size_(size),
      part_of_(static_cast<std::size_t>(size.num_blocks + size.num_host_blocks), -1),
      num_users_(static_cast<std::size_t>(size.max_parts > 0 ? size.max_parts : size.num_blocks), 0),
      last_used_(num_users_.size(), 0) {
  size_.max_parts = static_cast<int>(num_users_.size());
  COMMON_CHECK(
      size.num_parts > 0 && size.num_parts <= size_.max_parts && size_.max_parts <= size.num_blocks && size.window > 0,
      "a pool of windows has parts, and no more than there are blocks");
}

bool LocalPool::will_have_part(const KvCacheManager& manager, int block) const {
  const std::vector<BlockCopy> copies = untranslated(manager);
  std::for_each(copies.rbegin(), copies.rend(), [&](const BlockCopy& copy) {  // back to where its contents are now
    block = copy.destination == block ? copy.source : block;
  });
  return part_of(block) >= 0;
}

std::vector<BlockCopy> LocalPool::untranslated(const KvCacheManager& manager) const {
  std::vector<BlockCopy> copies;
  if (is_complete_) {
    return copies;
  }
  if (tier_ != nullptr) {
    copies.assign(tier_->pending_copies().begin(), tier_->pending_copies().end());
  }
  copies.insert(copies.end(), manager.pending_copies().begin(), manager.pending_copies().end());
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(num_translated_));
  return copies;
}

int LocalPool::num_needed(const KvCacheManager& manager) const {
  const std::set<int> copied = destinations(untranslated(manager));
  std::set<int> parts;
  std::set<int> without;  // blocks that will have another part, if they have one
  visit_windows(manager, size_.window, [&](int block, bool is_new) {
    if (is_new || part_of(block) < 0 || copied.contains(block)) {
      without.insert(block);
    } else {
      parts.insert(part_of(block));
    }
  });
  return static_cast<int>(parts.size() + without.size());
}

std::size_t LocalPool::share_parts(const KvCacheManager& manager, std::span<const int> blocks) {
  const PrefixCache& cache = manager.prefix_cache();
  const std::set<int> copied = destinations(untranslated(manager));  // their parts come with the copies
  const auto has_part = [&](int block) {
    return block < size_.num_blocks ? part_of(block) >= 0 && !copied.contains(block) : will_have_part(manager, block);
  };
  if (!std::all_of(blocks.begin(), blocks.end(), has_part)) {
    std::unordered_map<PrefixCache::TextId, int> parts;
    for (int block = 0; block < size_.num_blocks; ++block) {
      if (has_part(block) && cache.contains(block)) {
        parts[cache.entry(block).text] = part_of(block);
      }
    }
    for (const int block : blocks) {
      if (block >= size_.num_blocks) {
        break;
      }
      const auto same = parts.find(cache.entry(block).text);
      if (part_of(block) < 0 && !copied.contains(block) && same != parts.end()) {
        part_of_[static_cast<std::size_t>(block)] = same->second;
        num_users_[static_cast<std::size_t>(same->second)] += 1;
      }
    }
  }
  std::size_t num_usable = 0;
  std::size_t first = 0;  // of the blocks with parts, one after the other, that end here
  for (std::size_t count = 1; count <= blocks.size(); ++count) {
    first = has_part(blocks[count - 1]) ? first : count;
    const int first_seen = std::max(0, static_cast<int>(count) * size_.block_size + 1 - size_.window);
    if (static_cast<int>(first) <= first_seen / size_.block_size) {
      num_usable = count;
    }
  }
  return num_usable;
}

void LocalPool::begin_step(const KvCacheManager& manager) {
  if (is_complete_) {
    const std::size_t num_of_tier = tier_ != nullptr ? tier_->pending_copies().size() : 0;
    num_translated_ = num_of_tier + manager.pending_copies().size();  // what a step that failed has left
  }
  is_complete_ = false;
}

void LocalPool::end_step(const KvCacheManager& manager) {
  const Blocks keep = reached(manager);
  translate(manager, keep);
  for (int block = 0; block < size_.num_blocks; ++block) {
    if (part_of(block) >= 0 && manager.reference_count(block) == 0 && !manager.prefix_cache().contains(block)) {
      drop_part(block);
    }
  }
  visit_windows(manager, size_.window, [&](int block, bool is_new) {
    if (is_new) {
      give_part(block, keep);
    }
  });
  num_held_ = 0;
  step_ += 1;
  for (const int block : keep) {
    COMMON_CHECK(part_of(block) >= 0, "a window reaches a block without its part");
    std::int64_t& last_used = last_used_[static_cast<std::size_t>(part_of(block))];
    num_held_ += last_used < step_ ? 1 : 0;
    last_used = step_;
  }
  while (num_used_ > size_.num_parts && evict(keep)) {
  }
  is_complete_ = true;
}

LocalPool::Blocks LocalPool::reached(const KvCacheManager& manager) const {
  Blocks result;
  visit_windows(manager, size_.window, [&](int block, bool /*is_new*/) { result.insert(block); });
  return result;
}

void LocalPool::translate(const KvCacheManager& manager, const Blocks& reached) {
  const std::vector<BlockCopy> copies = untranslated(manager);
  Blocks keep = reached;  // and the sources of the copies that are still to come
  for (const auto& [source, destination] : copies) {
    keep.insert(source);
  }
  for (const auto& [source, destination] : copies) {
    pending_copies_.reserve(pending_copies_.size() + 1);
    const int part = part_of(source);
    int& copied = part_of_[static_cast<std::size_t>(destination)];
    if (destination >= size_.num_blocks) {
      copied = part < 0 ? -1 : destination;
    } else if (part < 0 || !keep.contains(destination)) {  // no window needs it
      drop_part(destination);
    } else {
      give_part(destination, keep);
    }
    keep.erase(keep.find(source));
    if (copied >= 0 && copied != part) {
      pending_copies_.push_back({part, copied});
    }
    num_translated_ += 1;
  }
}

void LocalPool::give_part(int block, const Blocks& keep) {
  const int before = part_of(block);
  if (before >= 0 && num_users_[static_cast<std::size_t>(before)] == 1) {
    return;
  }
  drop_part(block);
  while (num_used_ >= size_.num_parts && evict(keep)) {
  }
  const auto unused = std::find(num_users_.begin(), num_users_.end(), 0);
  COMMON_CHECK(unused != num_users_.end(), "each block that a window reaches has a part");
  *unused = 1;
  num_used_ += 1;
  part_of_[static_cast<std::size_t>(block)] = static_cast<int>(unused - num_users_.begin());
}

void LocalPool::drop_part(int block) {
  int& part = part_of_[static_cast<std::size_t>(block)];
  if (part >= 0 && --num_users_[static_cast<std::size_t>(part)] == 0) {
    num_used_ -= 1;
  }
  part = -1;
}

bool LocalPool::evict(const Blocks& keep) {
  std::set<int> kept;
  for (const int block : keep) {
    kept.insert(part_of(block));
  }
  int oldest = -1;
  for (int part = 0; part < size_.max_parts; ++part) {
    const auto last_used = [&](int which) { return last_used_[static_cast<std::size_t>(which)]; };
    if (!is_free(part) && !kept.contains(part) && (oldest < 0 || last_used(part) < last_used(oldest))) {
      oldest = part;
    }
  }
  for (int block = 0; oldest >= 0 && block < size_.num_blocks; ++block) {
    if (part_of(block) == oldest) {
      drop_part(block);
    }
  }
  num_evicted_ += oldest >= 0 ? 1 : 0;
  return oldest >= 0;
}

}  // namespace
