#include "local_pool.h"

#include <algorithm>
#include <functional>
#include <map>
#include <unordered_map>

#include "common/base/check.h"

namespace stage8 {
namespace {

// Calls visit(block, num_filled) for each block that a window reaches. num_filled: how many of its tokens are in the
// cache.
template <typename Visit>
void visit_windows(const KvCacheManager& manager, int window, const Visit& visit) {
  const int block_size = manager.block_size();
  for (const SequenceId sequence : manager.sequences()) {
    if (sequence < 0) {  // none of the engine's
      continue;
    }
    const int length = manager.length(sequence);
    const std::vector<int>& table = manager.block_table(sequence);
    for (int i = std::max(0, length + 1 - window) / block_size; i < static_cast<int>(table.size()); ++i) {
      visit(table[static_cast<std::size_t>(i)], std::clamp(length - i * block_size, 0, block_size));
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
      users_(static_cast<std::size_t>(size.num_parts)),
      reached_(static_cast<std::size_t>(size.num_blocks), false),
      last_count_(part_of_.size() + users_.size(), 0) {
  COMMON_CHECK(size.num_parts > 0 && size.num_parts <= size.num_blocks && size.window > 0,
               "a pool of windows has parts, and no more than there are blocks");
  for (int part = 0; part < size_.num_parts; ++part) {
    users_[static_cast<std::size_t>(part)].reserve(1);  // so that a part can be given, once it is free, without memory
    positions_.push_back(unused_.insert(unused_.end(), part));
    smallest_unused_.push_back(part);  // ascending: a heap
  }
}

bool LocalPool::will_have_part(const KvCacheManager& manager, int block) const {
  return has_part_after(untranslated(manager), block);
}

bool LocalPool::has_part_after(std::span<const BlockCopy> copies, int block) const {
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

int LocalPool::num_needed(const KvCacheManager& manager) {
  const std::set<int> copied = destinations(untranslated(manager));
  int result = 0;
  begin_count();
  visit_windows(manager, size_.window, [&](int block, int num_filled) {
    const int part = part_of(block);
    reached_[static_cast<std::size_t>(block)] = true;
    // It will have a part that no other block has, if it has none yet, or another one, or one that it writes to.
    const bool has_own = num_filled < size_.block_size || part < 0 || copied.contains(block);
    result += (has_own ? count_block(block) : count_part(part)) ? 1 : 0;
  });
  return result;
}

std::size_t LocalPool::num_usable(std::span<const int> blocks, const std::function<bool(int)>& has_part) const {
  std::size_t result = 0;
  std::size_t first = 0;  // of the blocks with parts, one after the other, that end here
  for (std::size_t count = 1; count <= blocks.size(); ++count) {
    first = has_part(blocks[count - 1]) ? first : count;
    if (first <= first_seen(count)) {
      result = count;
    }
  }
  return result;
}

std::size_t LocalPool::share_parts(const KvCacheManager& manager, std::span<const int> blocks) {
  const PrefixCache& cache = manager.prefix_cache();
  const std::vector<BlockCopy> copies = untranslated(manager);
  const auto has_part = [&](int block) { return has_part_after(copies, block); };
  if (num_usable(blocks, has_part) == blocks.size()) {
    return blocks.size();
  }
  const std::set<int> copied = destinations(copies);  // their parts come with the copies
  std::unordered_map<PrefixCache::TextId, int> parts;
  for (const int part : order_) {
    for (const int block : users_[static_cast<std::size_t>(part)]) {
      if (cache.contains(block) && !copied.contains(block)) {
        parts[cache.entry(block).text] = part;
      }
    }
  }
  std::map<int, int> on_host;  // by block of the pool: a host block with the same text, and with its part
  for (const int block : blocks) {
    if (block >= size_.num_blocks) {  // the host's come last
      break;
    }
    if (part_of(block) >= 0 || copied.contains(block)) {
      continue;
    }
    const PrefixCache::Entry& entry = cache.entry(block);
    if (const auto same = parts.find(entry.text); same != parts.end()) {
      share_part(block, same->second);
    } else if (tier_ != nullptr) {
      for (const int host_block : tier_->find(entry.parent_text, entry.tokens, entry.salt)) {
        if (part_of(host_block) >= 0 && !copied.contains(host_block)) {
          on_host[block] = host_block;
        }
      }
    }
  }
  const std::size_t count = num_usable(blocks, [&](int block) { return has_part(block) || on_host.contains(block); });
  bring_back(manager, copies, blocks.first(count).subspan(first_seen(count)), on_host);
  return num_usable(blocks, has_part);
}

void LocalPool::bring_back(const KvCacheManager& manager, std::span<const BlockCopy> copies,
                           std::span<const int> blocks, const std::map<int, int>& on_host) {
  Sources sources;
  for (const auto& [source, destination] : copies) {
    sources.all.insert(source);
  }
  begin_count();
  visit_windows(manager, size_.window, [&](int block, int /*num_filled*/) { count_block(block); });
  for (const int block : blocks) {
    count_block(block);
  }
  for (const int block : blocks) {
    const auto from = on_host.find(block);
    if (from == on_host.end() || part_of(block) >= 0) {
      continue;
    }
    pending_copies_.reserve(pending_copies_.size() + 1);
    if (smallest_unused_.empty() && !evict(sources.all)) {
      return;
    }
    give_part(block, sources);
    pending_copies_.push_back({from->second, part_of(block)});
    num_brought_back_ += 1;
  }
}

void LocalPool::begin_step(const KvCacheManager& manager) {
  if (is_complete_) {
    const std::size_t num_of_tier = tier_ != nullptr ? tier_->pending_copies().size() : 0;
    num_translated_ = num_of_tier + manager.pending_copies().size();  // what a step that failed has left
    reached_.assign(reached_.size(), false);
  }
  is_complete_ = false;
  num_needed(manager);  // notes what the windows reach
}

void LocalPool::end_step(const KvCacheManager& manager) {
  begin_count();
  visit_windows(manager, size_.window, [&](int block, int /*num_filled*/) {
    if (count_block(block) && part_of(block) >= 0) {
      order_.splice(order_.end(), order_, positions_[static_cast<std::size_t>(part_of(block))]);
    }
  });
  translate(manager);
  for (const int block : manager.free_blocks()) {
    drop_part(block);
  }
  num_held_ = 0;
  visit_windows(manager, size_.window, [&](int block, int num_filled) {
    if (num_filled < size_.block_size) {  // it will be written to
      pending_copies_.reserve(pending_copies_.size() + 1);
      const int before = part_of(block);
      COMMON_CHECK(before >= 0 || num_filled == 0, "a window reaches a block without its part");
      give_part(block, {});
      if (num_filled > 0 && part_of(block) != before) {
        pending_copies_.push_back({before, part_of(block)});
      }
    }
    COMMON_CHECK(part_of(block) >= 0, "a window reaches a block without its part");
    num_held_ += count_part(part_of(block)) ? 1 : 0;
  });
  is_complete_ = true;
}

void LocalPool::translate(const KvCacheManager& manager) {
  const std::vector<BlockCopy> copies = untranslated(manager);
  const int first_of_tier = size_.num_blocks + size_.num_host_blocks - (tier_ != nullptr ? tier_->num_blocks() : 0);
  const auto has_no_use = [&](const BlockCopy& copy) {  // for its part: it is swapped out, and no window reaches it
    return copy.destination >= size_.num_blocks && copy.destination < first_of_tier && copy.source < size_.num_blocks &&
           !reached_[static_cast<std::size_t>(copy.source)];
  };
  Sources sources;  // of the copies that are still to come
  for (const auto& [source, destination] : copies) {
    sources.all.insert(source);
  }
  // The second tier can do without a part, unless it comes back at once.
  const auto is_kept = [&](int destination) {
    return destination < first_of_tier || sources.all.contains(destination);
  };
  std::vector<bool> kept;
  for (const BlockCopy& copy : copies) {
    kept.push_back(is_kept(copy.destination) && !has_no_use(copy));
    if (kept.back()) {
      sources.kept.insert(copy.source);
    }
  }
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const auto& [source, destination] = copies[i];
    pending_copies_.reserve(pending_copies_.size() + 1);
    const int part = has_no_use(copies[i]) ? -1 : part_of(source);
    int& copied = part_of_[static_cast<std::size_t>(destination)];
    if (destination >= size_.num_blocks) {
      copied = part < 0 ? -1 : destination;
    } else if (part < 0 || !(is_counted(destination) || sources.all.contains(destination))) {  // no window needs it
      drop_part(destination);
    } else if (source < size_.num_blocks) {
      share_part(destination, part);
    } else {
      give_part(destination, sources);
    }
    sources.all.erase(sources.all.find(source));
    if (kept[i]) {
      sources.kept.erase(sources.kept.find(source));
    }
    if (copied >= 0 && copied != part) {
      pending_copies_.push_back({part, copied});
    }
    num_translated_ += 1;
  }
}

void LocalPool::share_part(int block, int part) {
  if (part_of(block) != part) {
    drop_part(block);
    users_[static_cast<std::size_t>(part)].push_back(block);
    part_of_[static_cast<std::size_t>(block)] = part;
  }
}

void LocalPool::give_part(int block, const Sources& sources) {
  const int before = part_of(block);
  if (before >= 0 && users_[static_cast<std::size_t>(before)].size() == 1) {
    return;
  }
  drop_part(block);
  if (smallest_unused_.empty() && !evict(sources.all)) {
    evict(sources.kept);
  }
  COMMON_CHECK(!smallest_unused_.empty(), "each block that a window reaches has a part");
  const int part = smallest_unused_.front();
  users_[static_cast<std::size_t>(part)].push_back(block);
  std::pop_heap(smallest_unused_.begin(), smallest_unused_.end(), std::greater<>());
  smallest_unused_.pop_back();
  order_.splice(order_.end(), unused_, positions_[static_cast<std::size_t>(part)]);
  part_of_[static_cast<std::size_t>(block)] = part;
}

void LocalPool::drop_part(int block) {
  const int part = std::exchange(part_of_[static_cast<std::size_t>(block)], -1);
  if (part < 0) {
    return;
  }
  std::vector<int>& users = users_[static_cast<std::size_t>(part)];
  std::erase(users, block);
  if (users.empty()) {
    smallest_unused_.push_back(part);  // has the memory: it had all parts once
    std::push_heap(smallest_unused_.begin(), smallest_unused_.end(), std::greater<>());
    unused_.splice(unused_.end(), order_, positions_[static_cast<std::size_t>(part)]);
  }
}

bool LocalPool::evict(const Blocks& sources) {
  // Parts of blocks that a window reaches are at the end.
  const auto oldest = std::find_if(order_.begin(), order_.end(), [&](int part) {
    const std::vector<int>& users = users_[static_cast<std::size_t>(part)];
    return std::none_of(users.begin(), users.end(),
                        [&](int block) { return is_counted(block) || sources.contains(block); });
  });
  if (oldest == order_.end()) {
    return false;
  }
  std::vector<int>& users = users_[static_cast<std::size_t>(*oldest)];
  while (!users.empty()) {
    drop_part(users.back());
  }
  num_evicted_ += 1;
  return true;
}

}  // namespace
