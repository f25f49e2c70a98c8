#include "kv_cache_manager.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "common/base/check.h"

namespace stage8 {

int blocks_needed(int num_tokens, int block_size) {
  return num_tokens / block_size + (num_tokens % block_size > 0 ? 1 : 0);
}

KvCacheManager::KvCacheManager(int num_blocks, int block_size, HashFunction hash, int num_host_blocks)
    : num_blocks_(num_blocks), block_size_(block_size), prefix_cache_(block_size, std::move(hash)) {
  COMMON_CHECK(num_blocks > 0 && block_size > 0, "the cache has no slots");
  COMMON_CHECK(num_blocks <= std::numeric_limits<int>::max() / block_size, "too many slots for an int");
  reference_counts_.resize(static_cast<std::size_t>(num_blocks) + static_cast<std::size_t>(num_host_blocks));
  for (int block = num_blocks - 1; block >= 0; --block) {
    free_blocks_.push_back(block);
  }
  for (int block = num_blocks + num_host_blocks - 1; block >= num_blocks; --block) {
    free_host_blocks_.push_back(block);
  }
}

bool KvCacheManager::allocate(SequenceId sequence, int num_tokens) {
  check_is_new(sequence);
  COMMON_CHECK(num_tokens > 0, "a sequence needs at least one slot");
  const int num_blocks = blocks_needed(num_tokens, block_size_);
  if (num_blocks > num_available()) {
    return false;
  }
  Sequence owner;
  owner.block_table.reserve(static_cast<std::size_t>(num_blocks));
  owner.tail.reserve(static_cast<std::size_t>(block_size_));
  sequences_[sequence] = std::move(owner);
  return reserve(sequence, num_tokens);  // succeeds: the blocks are free, and the table has its memory
}

bool KvCacheManager::allocate(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt,
                              const Admission& admission) {
  check_is_new(sequence);
  COMMON_CHECK(!tokens.empty(), "a sequence needs at least one token");
  COMMON_CHECK(admission.max_tokens > 0 && admission.spare_blocks >= 0, "an admission allows at least one token");
  if (num_available() <= admission.spare_blocks) {
    return false;  // before the tokens are hashed: a prompt that waits for memory is refused in every step
  }
  const std::size_t max_found = admission.use_prefix_cache ? tokens.size() - 1 : 0;
  const std::vector<int> hits = prefix_cache_.find(tokens.first(max_found), salt);
  const auto is_evictable = [&](int block) { return reference_count(block) == 0; };
  const auto num_evictable = static_cast<int>(std::count_if(hits.begin(), hits.end(), is_evictable));
  const int num_tokens =
      std::min(admission.max_tokens, static_cast<int>(tokens.size()) - static_cast<int>(hits.size()) * block_size_);
  const int num_blocks = blocks_needed(num_tokens, block_size_);
  if (num_blocks > num_available() - num_evictable - admission.spare_blocks) {
    return false;
  }
  // Everything that may throw comes first: if memory runs out, nothing has changed.
  const int num_found = static_cast<int>(hits.size()) * block_size_;
  Sequence owner = {hits, num_found, num_found, {}, salt};
  owner.block_table.reserve(hits.size() + static_cast<std::size_t>(num_blocks));
  owner.tail.reserve(static_cast<std::size_t>(block_size_));
  sequences_[sequence] = std::move(owner);
  for (const int block : hits) {
    if (reference_counts_[static_cast<std::size_t>(block)]++ == 0) {
      prefix_cache_.reacquire(block);
    }
  }
  if (admission.use_prefix_cache) {
    prefix_cache_.count_lookup(hits.size());
  }
  return reserve(sequence, num_tokens);
}

bool KvCacheManager::reserve(SequenceId sequence, int num_tokens) {
  COMMON_CHECK(num_tokens >= 0, "can't reserve a negative number of tokens");
  Sequence& owner = find(sequence);
  if (!can_reserve({&sequence, 1}, num_tokens)) {
    return false;
  }
  // Everything that may throw comes first: if memory runs out, nothing has changed.
  owner.block_table.reserve(static_cast<std::size_t>(blocks_needed(owner.length + num_tokens, block_size_)));
  if (num_tokens > 0 && owner.length % block_size_ != 0) {
    int& block = owner.block_table[static_cast<std::size_t>(owner.length / block_size_)];
    if (reference_count(block) > 1) {  // the last owner writes in place
      pending_copies_.push_back({block, -1});
      pending_copies_.back().destination = allocate_block();
      release_block(std::exchange(block, pending_copies_.back().destination));
    }
  }
  while (num_tokens > capacity(sequence) - owner.length) {
    owner.block_table.push_back(allocate_block());
  }
  return true;
}

void KvCacheManager::release_reserved(SequenceId sequence) {
  Sequence& owner = find(sequence);
  for (int n = blocks_needed(owner.length, block_size_); static_cast<int>(owner.block_table.size()) > n;) {
    release_block(owner.block_table.back());
    owner.block_table.pop_back();
  }
}

int KvCacheManager::max_reservable(SequenceId sequence) const {
  if (!can_reserve({&sequence, 1}, 1)) {
    return 0;
  }
  const Sequence& owner = find(sequence);
  int num_blocks = num_available();
  if (owner.length % block_size_ != 0) {
    const int block = owner.block_table[static_cast<std::size_t>(owner.length / block_size_)];
    num_blocks -= reference_count(block) > 1 ? 1 : 0;  // for a copy of it
  }
  return capacity(sequence) - owner.length + num_blocks * block_size_;
}

bool KvCacheManager::can_reserve(std::span<const SequenceId> sequences, int num_tokens) const {
  std::int64_t num_blocks = 0;
  std::map<int, int> writers;  // by partly filled block: how many of the sequences would write to it
  for (const SequenceId sequence : sequences) {
    const Sequence& owner = find(sequence);
    num_blocks += blocks_needed(std::max(num_tokens - (capacity(sequence) - owner.length), 0), block_size_);
    if (num_tokens > 0 && owner.length % block_size_ != 0) {
      writers[owner.block_table[static_cast<std::size_t>(owner.length / block_size_)]] += 1;
    }
  }
  for (const auto& [block, count] : writers) {
    num_blocks += std::min(count, reference_count(block) - 1);
  }
  return num_blocks <= num_available();
}

void KvCacheManager::fork(SequenceId parent, SequenceId child) {
  check_is_new(child);
  Sequence copy = find(parent);
  // Blocks that the parent has reserved ahead hold no tokens to share.
  copy.block_table.resize(static_cast<std::size_t>(blocks_needed(copy.length, block_size_)));
  copy.tail.reserve(static_cast<std::size_t>(block_size_));
  sequences_[child] = std::move(copy);
  for (const int block : sequences_[child].block_table) {
    reference_counts_[static_cast<std::size_t>(block)] += 1;
  }
}

std::vector<int> KvCacheManager::slots(SequenceId sequence, int first, int count) const {
  COMMON_CHECK(first >= 0 && count >= 0 && count <= capacity(sequence) - first, "positions outside the reservation");
  const Sequence& owner = find(sequence);
  std::vector<int> result;
  for (int position = first; position < first + count; ++position) {
    const int block = owner.block_table[static_cast<std::size_t>(position / block_size_)];
    result.push_back(block * block_size_ + position % block_size_);
  }
  return result;
}

void KvCacheManager::commit(SequenceId sequence, int num_tokens) {
  Sequence& owner = find(sequence);
  COMMON_CHECK(num_tokens >= 0 && num_tokens <= capacity(sequence) - owner.length, "committed what was not reserved");
  const auto tail = static_cast<std::size_t>(owner.length / block_size_);
  COMMON_CHECK(num_tokens == 0 || reference_count(owner.block_table[tail]) == 1, "committed into a shared block");
  owner.length += num_tokens;
}

void KvCacheManager::publish(SequenceId sequence, std::span<const common::Token> tokens) {
  const bool is_out = is_swapped(sequence);
  Sequence& owner = is_out ? swapped_.at(sequence) : find(sequence);
  if (owner.num_known != owner.length - static_cast<int>(tokens.size())) {
    return;  // some tokens before them are not known
  }
  for (const common::Token token : tokens) {
    const auto index = static_cast<std::size_t>(owner.num_known++ / block_size_);
    owner.tail.push_back(token);
    if (static_cast<int>(owner.tail.size()) < block_size_) {
      continue;
    }
    const int block = owner.block_table[index];
    if (!is_out) {
      prefix_cache_.publish(block, index == 0 ? -1 : owner.block_table[index - 1], owner.tail, owner.salt);
    } else {
      try {
        host_tokens_.emplace(block, owner.tail);
      } catch (const std::bad_alloc&) {  // as in publish(): no reason to fail
      }
    }
    owner.tail.clear();
  }
}

void KvCacheManager::commit(SequenceId sequence, std::span<const common::Token> tokens) {
  commit(sequence, static_cast<int>(tokens.size()));
  publish(sequence, tokens);
}

void KvCacheManager::free(SequenceId sequence) {
  if (is_swapped(sequence)) {
    for (const int block : swapped_.at(sequence).block_table) {
      release_host_block(block);
    }
    swapped_.erase(sequence);
    return;
  }
  std::vector<int>& table = find(sequence).block_table;
  for (; !table.empty(); table.pop_back()) {
    release_block(table.back());
  }
  sequences_.erase(sequence);
}

bool KvCacheManager::swap_out(std::span<const SequenceId> sequences) {
  // Everything that may throw comes first: if a check fails or memory runs out, nothing has changed.
  std::map<int, int> host_blocks;                         // by block
  std::map<int, std::vector<common::Token>> host_tokens;  // by host block, of published blocks
  for (const SequenceId id : sequences) {
    const Sequence& sequence = find(id);
    COMMON_CHECK(std::count(sequences.begin(), sequences.end(), id) == 1, "a sequence can't be swapped out twice");
    for (int i = 0; i < blocks_needed(sequence.length, block_size_); ++i) {
      const int block = sequence.block_table[static_cast<std::size_t>(i)];
      if (host_blocks.contains(block)) {
        continue;
      }
      if (host_blocks.size() == free_host_blocks_.size()) {
        return false;
      }
      const int host_block = free_host_blocks_.rbegin()[static_cast<std::ptrdiff_t>(host_blocks.size())];
      host_blocks[block] = host_block;
      if (prefix_cache_.contains(block)) {
        host_tokens[host_block] = prefix_cache_.entry(block).tokens;
      }
    }
  }
  pending_copies_.reserve(pending_copies_.size() + host_blocks.size());

  free_host_blocks_.resize(free_host_blocks_.size() - host_blocks.size());
  host_tokens_.merge(host_tokens);
  for (const auto& [block, host_block] : host_blocks) {
    pending_copies_.push_back({block, host_block});
  }
  for (const SequenceId id : sequences) {
    Sequence& sequence = find(id);
    // From the end, as in free(), so that the last block is evicted first. Blocks reserved ahead need no copy.
    for (std::size_t i = sequence.block_table.size(); i-- > 0;) {
      const int block = sequence.block_table[i];
      if (static_cast<int>(i) < blocks_needed(sequence.length, block_size_)) {
        sequence.block_table[i] = host_blocks.at(block);
        reference_counts_[static_cast<std::size_t>(sequence.block_table[i])] += 1;
      } else {
        sequence.block_table.pop_back();
      }
      release_block(block);
    }
    swapped_.insert(sequences_.extract(id));
  }
  return true;
}

bool KvCacheManager::swap_in(std::span<const SequenceId> sequences, int spare_blocks) {
  std::map<int, int> blocks;  // by host block
  for (const SequenceId id : sequences) {
    COMMON_CHECK(is_swapped(id), "sequence " + std::to_string(id) + " is not swapped out");
    COMMON_CHECK(std::count(sequences.begin(), sequences.end(), id) == 1, "a sequence can't be swapped in twice");
    for (const int host_block : swapped_.at(id).block_table) {
      blocks[host_block] = -1;
    }
  }
  if (static_cast<int>(blocks.size()) > num_available() - spare_blocks) {
    return false;
  }
  pending_copies_.reserve(pending_copies_.size() + blocks.size());

  for (auto& [host_block, block] : blocks) {
    block = allocate_block();
    reference_counts_[static_cast<std::size_t>(block)] = 0;
    pending_copies_.push_back({host_block, block});
  }
  for (const SequenceId id : sequences) {
    Sequence& sequence = swapped_.at(id);
    for (std::size_t i = 0; i < sequence.block_table.size(); ++i) {
      const int host_block = sequence.block_table[i];
      const int block = blocks.at(host_block);
      sequence.block_table[i] = block;
      reference_counts_[static_cast<std::size_t>(block)] += 1;
      // A block that was published before is published again, if the blocks before it are.
      if (const auto tokens = host_tokens_.find(host_block);
          tokens != host_tokens_.end() && !prefix_cache_.contains(block)) {
        prefix_cache_.publish(block, i == 0 ? -1 : sequence.block_table[i - 1], tokens->second, sequence.salt);
      }
      release_host_block(host_block);
    }
    sequences_.insert(swapped_.extract(id));
  }
  return true;
}

Usage KvCacheManager::usage_of(std::span<const SequenceId> sequences) const {
  std::map<int, int> used;  // slots that hold a token, by block
  for (const SequenceId id : sequences) {
    const Sequence& sequence = find(id);
    int rest = sequence.length;
    for (int i = 0; i < blocks_needed(sequence.length, block_size_); ++i) {
      const int block = sequence.block_table[static_cast<std::size_t>(i)];
      used[block] = std::min(rest, block_size_);
      rest -= used[block];
    }
  }
  Usage usage;
  usage.total = num_blocks_ * block_size_;
  usage.reserved = static_cast<int>(used.size()) * block_size_;
  for (const auto& [block, count] : used) {
    usage.used += count;
  }
  return usage;
}

int KvCacheManager::length(SequenceId sequence) const { return find(sequence).length; }

int KvCacheManager::capacity(SequenceId sequence) const {
  return static_cast<int>(find(sequence).block_table.size()) * block_size_;
}

const std::vector<int>& KvCacheManager::block_table(SequenceId sequence) const { return find(sequence).block_table; }

std::vector<SequenceId> KvCacheManager::sequences() const {
  std::vector<SequenceId> result;
  for (const auto& [id, sequence] : sequences_) {
    result.push_back(id);
  }
  return result;
}

Usage KvCacheManager::usage() const {
  Usage usage;
  usage.total = num_blocks_ * block_size_;
  usage.cached = static_cast<int>(prefix_cache_.evictable().size()) * block_size_;
  usage.reserved = usage.total - num_available() * block_size_;
  // All owners of a block agree on how far it is filled: a shared block is never written to.
  std::map<int, int> unused;  // by block: empty slots, for the few blocks that are not full
  for (const auto& [id, sequence] : sequences_) {
    for (int i = sequence.length / block_size_; i < static_cast<int>(sequence.block_table.size()); ++i) {
      const int filled = std::max(0, sequence.length - i * block_size_);
      unused[sequence.block_table[static_cast<std::size_t>(i)]] = block_size_ - filled;
    }
  }
  usage.used = usage.reserved;
  for (const auto& [block, count] : unused) {
    usage.used -= count;
  }
  return usage;
}

void KvCacheManager::reset_prefix_cache() {
  const std::vector<int> blocks = prefix_cache_.reset();
  free_blocks_.insert(free_blocks_.end(), blocks.begin(), blocks.end());
  for (auto& [id, sequence] : sequences_) {
    sequence.num_known = -1;  // else a block would be published when it is full
  }
  for (auto& [id, sequence] : swapped_) {
    sequence.num_known = -1;
  }
  host_tokens_.clear();
}

int KvCacheManager::num_available() const {
  return static_cast<int>(free_blocks_.size() + prefix_cache_.evictable().size());
}

int KvCacheManager::allocate_block() {
  if (free_blocks_.empty()) {
    if (on_evict_) {
      on_evict_(prefix_cache_.evictable().front());
    }
    free_blocks_.push_back(prefix_cache_.evict());
  }
  const int block = free_blocks_.back();
  free_blocks_.pop_back();
  reference_counts_[static_cast<std::size_t>(block)] = 1;
  return block;
}

void KvCacheManager::release_block(int block) {
  if (--reference_counts_[static_cast<std::size_t>(block)] > 0) {
    return;
  }
  if (prefix_cache_.contains(block)) {
    prefix_cache_.make_evictable(block);
  } else {
    free_blocks_.push_back(block);
  }
}

void KvCacheManager::release_host_block(int block) {
  if (--reference_counts_[static_cast<std::size_t>(block)] == 0) {
    free_host_blocks_.push_back(block);
    host_tokens_.erase(block);
  }
}

void KvCacheManager::check_is_new(SequenceId sequence) const {
  COMMON_CHECK(!contains(sequence) && !is_swapped(sequence),
               "sequence " + std::to_string(sequence) + " is live already");
}

KvCacheManager::Sequence& KvCacheManager::find(SequenceId sequence) {
  const auto found = sequences_.find(sequence);
  COMMON_CHECK(found != sequences_.end(), "no live sequence " + std::to_string(sequence));
  return found->second;
}

const KvCacheManager::Sequence& KvCacheManager::find(SequenceId sequence) const {
  const auto found = sequences_.find(sequence);
  COMMON_CHECK(found != sequences_.end(), "no live sequence " + std::to_string(sequence));
  return found->second;
}

}  // namespace
