#include "kv_cache_manager.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "common/base/check.h"

namespace stage1 {

KvCacheManager::KvCacheManager(int num_slots) : num_slots_(num_slots) {
  COMMON_CHECK(num_slots > 0, "the cache has no slots");
  holes_.push_back({0, num_slots});
}

bool KvCacheManager::allocate(SequenceId sequence, int num_tokens) {
  COMMON_CHECK(!sequences_.contains(sequence), "sequence " + std::to_string(sequence) + " is live already");
  COMMON_CHECK(num_tokens > 0, "a sequence needs at least one slot");
  const auto hole =
      std::find_if(holes_.begin(), holes_.end(), [&](const Region& candidate) { return candidate.size >= num_tokens; });
  if (hole == holes_.end()) {
    return false;
  }
  sequences_[sequence].region = {hole->first, num_tokens};
  hole->first += num_tokens;
  hole->size -= num_tokens;
  if (hole->size == 0) {
    holes_.erase(hole);
  }
  return true;
}

bool KvCacheManager::reserve(SequenceId sequence, int num_tokens) {
  COMMON_CHECK(num_tokens >= 0, "can't reserve a negative number of tokens");
  return num_tokens <= capacity(sequence) - find(sequence).length;
}

std::vector<int> KvCacheManager::slots(SequenceId sequence, int first, int count) const {
  COMMON_CHECK(first >= 0 && count >= 0 && count <= capacity(sequence) - first, "positions outside the reservation");
  const Sequence& owner = find(sequence);
  std::vector<int> result;
  for (int position = first; position < first + count; ++position) {
    result.push_back(owner.region.first + position);
  }
  return result;
}

void KvCacheManager::commit(SequenceId sequence, int num_tokens) {
  Sequence& owner = find(sequence);
  COMMON_CHECK(num_tokens >= 0 && num_tokens <= capacity(sequence) - owner.length, "committed what was not reserved");
  owner.length += num_tokens;
}

void KvCacheManager::free(SequenceId sequence) {
  const Region region = find(sequence).region;
  const auto after =
      std::find_if(holes_.begin(), holes_.end(), [&](const Region& hole) { return hole.first > region.first; });
  auto hole = holes_.insert(after, region);  // comes first because it may throw
  sequences_.erase(sequence);
  // Merge holes that touch: otherwise the arena would fill with holes too small for any sequence.
  const auto next = std::next(hole);
  if (next != holes_.end() && hole->first + hole->size == next->first) {
    hole->size += next->size;
    holes_.erase(next);
  }
  if (hole != holes_.begin()) {
    const auto previous = std::prev(hole);
    if (previous->first + previous->size == hole->first) {
      previous->size += hole->size;
      holes_.erase(hole);
    }
  }
}

int KvCacheManager::length(SequenceId sequence) const { return find(sequence).length; }

int KvCacheManager::capacity(SequenceId sequence) const { return find(sequence).region.size; }

Region KvCacheManager::region(SequenceId sequence) const { return find(sequence).region; }

std::vector<SequenceId> KvCacheManager::sequences() const {
  std::vector<SequenceId> result;
  for (const auto& [id, sequence] : sequences_) {
    result.push_back(id);
  }
  return result;
}

Usage KvCacheManager::usage() const {
  Usage usage;
  usage.total = num_slots_;
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
