#include "local_pool.h"

#include <algorithm>
#include <functional>
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

// The same copies: those to the host first, unless their order matters. What they copy can be given up then.
std::vector<BlockCopy> with_host_first(std::span<const BlockCopy> copies, int num_blocks) {
  std::vector<BlockCopy> first;
  std::vector<BlockCopy> others;
  std::set<int> read;  // by the others
  std::set<int> written;
  for (const auto& [source, destination] : copies) {
    if (destination >= num_blocks && !written.contains(source) && !written.contains(destination) &&
        !read.contains(destination)) {
      first.push_back({source, destination});
    } else {
      others.push_back({source, destination});
      read.insert(source);
      written.insert(destination);
    }
  }
  first.insert(first.end(), others.begin(), others.end());
  return first;
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
      users_(static_cast<std::size_t>(size.max_parts > 0 ? size.max_parts : size.num_blocks)),
      last_count_(part_of_.size() + users_.size(), 0) {
  size_.max_parts = static_cast<int>(users_.size());
  COMMON_CHECK(
      size.num_parts > 0 && size.num_parts <= size_.max_parts && size_.max_parts <= size.num_blocks && size.window > 0,
      "a pool of windows has parts, and no more than there are blocks");
  for (int part = 0; part < size_.max_parts; ++part) {
    positions_.push_back(unused_.insert(unused_.end(), part));
    smallest_unused_.push_back(part);  // ascending: a heap
    users_[static_cast<std::size_t>(part)].reserve(1);
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
  visit_windows(manager, size_.window, [&](int block, bool is_new) {
    const int part = part_of(block);
    const bool is_without = is_new || part < 0 || copied.contains(block);  // it will have another part, if it has one
    result += (is_without ? count_block(block) : count_part(part)) ? 1 : 0;
  });
  return result;
}

std::size_t LocalPool::num_usable(const KvCacheManager& manager, std::span<const int> blocks,
                                  const std::set<int>& copied) const {
  const std::vector<BlockCopy> copies = untranslated(manager);
  std::size_t result = 0;
  std::size_t first = 0;  // of the blocks with parts, one after the other, that end here
  for (std::size_t count = 1; count <= blocks.size(); ++count) {
    const int block = blocks[count - 1];
    const bool has_part =
        block < size_.num_blocks ? part_of(block) >= 0 && !copied.contains(block) : has_part_after(copies, block);
    first = has_part ? first : count;
    const int first_seen = std::max(0, static_cast<int>(count) * size_.block_size + 1 - size_.window);
    if (static_cast<int>(first) <= first_seen / size_.block_size) {
      result = count;
    }
  }
  return result;
}

std::size_t LocalPool::share_parts(const KvCacheManager& manager, std::span<const int> blocks) {
  const PrefixCache& cache = manager.prefix_cache();
  const std::set<int> copied = destinations(untranslated(manager));  // their parts come with the copies
  if (const std::size_t count = num_usable(manager, blocks, copied); count == blocks.size()) {
    return count;
  }
  std::unordered_map<PrefixCache::TextId, int> parts;
  for (const int part : order_) {
    for (const int block : users_[static_cast<std::size_t>(part)]) {
      if (cache.contains(block) && !copied.contains(block)) {
        parts[cache.entry(block).text] = part;
      }
    }
  }
  for (const int block : blocks) {
    if (block >= size_.num_blocks) {  // the host's come last
      break;
    }
    const auto same = parts.find(cache.entry(block).text);
    if (part_of(block) < 0 && !copied.contains(block) && same != parts.end()) {
      users_[static_cast<std::size_t>(same->second)].push_back(block);
      part_of_[static_cast<std::size_t>(block)] = same->second;
    }
  }
  return num_usable(manager, blocks, copied);
}

void LocalPool::begin_step(const KvCacheManager& manager) {
  if (is_complete_) {
    const std::size_t num_of_tier = tier_ != nullptr ? tier_->pending_copies().size() : 0;
    num_translated_ = num_of_tier + manager.pending_copies().size();  // what a step that failed has left
  }
  is_complete_ = false;
}

void LocalPool::end_step(const KvCacheManager& manager) {
  begin_count();
  visit_windows(manager, size_.window, [&](int block, bool /*is_new*/) {
    if (count_block(block) && part_of(block) >= 0) {
      order_.splice(order_.end(), order_, positions_[static_cast<std::size_t>(part_of(block))]);
    }
  });
  translate(manager);
  for (const int block : manager.free_blocks()) {
    drop_part(block);
  }
  num_held_ = 0;
  visit_windows(manager, size_.window, [&](int block, bool is_new) {
    if (is_new) {
      give_part(block, {});
    }
    COMMON_CHECK(part_of(block) >= 0, "a window reaches a block without its part");
    num_held_ += count_part(part_of(block)) ? 1 : 0;
  });
  while (num_used() > size_.num_parts && evict({})) {
  }
  is_complete_ = true;
}

void LocalPool::translate(const KvCacheManager& manager) {
  const std::vector<BlockCopy> copies = with_host_first(untranslated(manager), size_.num_blocks);
  Blocks sources;  // of the copies that are still to come
  for (const auto& [source, destination] : copies) {
    sources.insert(source);
  }
  pending_copies_.reserve(pending_copies_.size() + copies.size());
  for (const auto& [source, destination] : copies) {  // nothing allocates memory from here on: all are planned, or none
    const int part = part_of(source);
    int& copied = part_of_[static_cast<std::size_t>(destination)];
    if (destination >= size_.num_blocks) {
      copied = part < 0 ? -1 : destination;
    } else if (part < 0 || !(is_counted(destination) || sources.contains(destination))) {  // no window needs it
      drop_part(destination);
    } else {
      give_part(destination, sources);
    }
    sources.erase(sources.find(source));
    if (copied >= 0 && copied != part) {
      pending_copies_.push_back({part, copied});
    }
  }
  num_translated_ += copies.size();
}

void LocalPool::give_part(int block, const Blocks& sources) {
  const int before = part_of(block);
  if (before >= 0 && users_[static_cast<std::size_t>(before)].size() == 1) {
    return;
  }
  drop_part(block);
  while (num_used() >= size_.num_parts && evict(sources)) {
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
