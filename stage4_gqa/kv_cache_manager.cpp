#include "kv_cache_manager.h"

#include <limits>
#include <string>
#include <utility>

#include "common/base/check.h"

namespace stage4 {

int blocks_needed(int num_tokens, int block_size) {
  return num_tokens / block_size + (num_tokens % block_size > 0 ? 1 : 0);
}

KvCacheManager::KvCacheManager(int num_blocks, int block_size) : num_blocks_(num_blocks), block_size_(block_size) {
  COMMON_CHECK(num_blocks > 0 && block_size > 0, "the cache has no slots");
  COMMON_CHECK(num_blocks <= std::numeric_limits<int>::max() / block_size, "too many slots for an int");
  for (int block = num_blocks - 1; block >= 0; --block) {
    free_blocks_.push_back(block);
  }
}

bool KvCacheManager::allocate(SequenceId sequence, int num_tokens) {
  COMMON_CHECK(!sequences_.contains(sequence), "sequence " + std::to_string(sequence) + " is live already");
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
  const int free_slots = static_cast<int>(free_blocks_.size()) * block_size_;
  if (num_tokens > capacity(sequence) - owner.length + free_slots) {
    return false;
  }
  // Everything that may throw comes first: if memory runs out, nothing has changed.
  owner.block_table.reserve(static_cast<std::size_t>(blocks_needed(owner.length + num_tokens, block_size_)));
  while (num_tokens > capacity(sequence) - owner.length) {
    owner.block_table.push_back(free_blocks_.back());
    free_blocks_.pop_back();
  }
  return true;
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
  owner.length += num_tokens;
}

void KvCacheManager::free(SequenceId sequence) {
  const std::vector<int>& table = find(sequence).block_table;
  free_blocks_.insert(free_blocks_.end(), table.rbegin(), table.rend());
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
  for (const auto& [id, sequence] : sequences_) {
    usage.reserved += capacity(id);
    usage.used += sequence.length;
  }
  return usage;
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
