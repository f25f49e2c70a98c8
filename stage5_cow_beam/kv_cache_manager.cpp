#include "kv_cache_manager.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "common/base/check.h"

namespace stage5 {

int blocks_needed(int num_tokens, int block_size) {
  return num_tokens / block_size + (num_tokens % block_size > 0 ? 1 : 0);
}

KvCacheManager::KvCacheManager(int num_blocks, int block_size) : num_blocks_(num_blocks), block_size_(block_size) {
  COMMON_CHECK(num_blocks > 0 && block_size > 0, "the cache has no slots");
  COMMON_CHECK(num_blocks <= std::numeric_limits<int>::max() / block_size, "too many slots for an int");
  reference_counts_.resize(static_cast<std::size_t>(num_blocks));
  for (int block = num_blocks - 1; block >= 0; --block) {
    free_blocks_.push_back(block);
  }
}

bool KvCacheManager::allocate(SequenceId sequence, int num_tokens) {
  check_is_new(sequence);
  COMMON_CHECK(num_tokens > 0, "a sequence needs at least one slot");
  const int num_blocks = blocks_needed(num_tokens, block_size_);
  if (num_blocks > static_cast<int>(free_blocks_.size())) {
    return false;
  }
  Sequence owner;
  owner.block_table.reserve(static_cast<std::size_t>(num_blocks));
  sequences_[sequence] = std::move(owner);
  return reserve(sequence, num_tokens);  // succeeds: the blocks are free, and the table has its memory
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
  return num_blocks <= static_cast<std::int64_t>(free_blocks_.size());
}

void KvCacheManager::fork(SequenceId parent, SequenceId child) {
  check_is_new(child);
  Sequence copy = find(parent);
  // Blocks that the parent has reserved ahead hold no tokens to share.
  copy.block_table.resize(static_cast<std::size_t>(blocks_needed(copy.length, block_size_)));
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

void KvCacheManager::free(SequenceId sequence) {
  std::vector<int>& table = find(sequence).block_table;
  for (; !table.empty(); table.pop_back()) {
    release_block(table.back());
  }
  sequences_.erase(sequence);
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
  usage.reserved = usage.total - static_cast<int>(free_blocks_.size()) * block_size_;
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

int KvCacheManager::allocate_block() {
  const int block = free_blocks_.back();
  free_blocks_.pop_back();
  reference_counts_[static_cast<std::size_t>(block)] = 1;
  return block;
}

void KvCacheManager::release_block(int block) {
  if (--reference_counts_[static_cast<std::size_t>(block)] == 0) {
    free_blocks_.push_back(block);
  }
}

void KvCacheManager::check_is_new(SequenceId sequence) const {
  COMMON_CHECK(!contains(sequence), "sequence " + std::to_string(sequence) + " is live already");
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
