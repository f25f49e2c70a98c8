#include "local_pool_scheduler.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "block_ownership.h"
#include "common/base/text.h"
#include "finding_room.h"

namespace stage8 {

int num_local_parts(const common::LlamaConfig& config, const EngineOptions& options, const CacheSize& cache) {
  const int max_length = std::min(max_context(config, options), cache.num_blocks * cache.block_size);
  const std::int64_t text = blocks_needed(max_length, cache.block_size);
  const std::int64_t window = max_blocks_of_window(config.window, cache.block_size);
  const std::int64_t balanced = (cache.num_blocks * window + text - 1) / text;
  const std::int64_t least = 2 * window + blocks_needed(options.scheduler.token_budget, cache.block_size);
  return static_cast<int>(std::min<std::int64_t>(std::max(balanced, least), cache.num_blocks));
}

LocalPoolScheduler::LocalPoolScheduler(std::shared_ptr<LocalPool> pool, KvCacheManager& manager,
                                       const SchedulerOptions& options, bool use_prefix_cache, int default_drafts,
                                       const TokenCost& cost, std::shared_ptr<HostCache> host_cache)
    : HostCacheScheduler(manager, options, use_prefix_cache, default_drafts, cost, std::move(host_cache)),
      pool_(std::move(pool)) {
  pool_->attach(host_cache_);
}

ScheduledStep LocalPoolScheduler::schedule() {
  const int num_parts = pool_->size().num_parts;
  const Accounts accounts = accounts_;
  has_preempted_ = false;
  pool_->begin_step(manager_);
  ScheduledStep step;
  for (bool is_first = true, fits = false; !fits; is_first = false) {
    const int room = std::max(0, num_parts - pool_->num_needed(manager_));
    const bool is_short = !is_first || max_growth() > room;
    ScheduledStep attempt;
    take_over_copies();  // before the ballast evicts a block
    {
      const HeldBlocks ballast(manager_, is_short ? num_available(manager_) - room : 0);
      attempt = HostCacheScheduler::schedule();
    }
    // A request that is preempted leaves more blocks than parts, so that too many may have been reserved, or more parts
    // than blocks. Each further attempt begins with fewer requests, or with one that was alone and found less room than
    // it was admitted for.
    const bool has_changed = !attempt.admitted.empty() || !attempt.preempted.empty();
    fits = has_changed ? pool_->num_needed(manager_) <= num_parts && !attempt.groups.empty()
                       : is_short || pool_->num_needed(manager_) <= num_parts;
    has_preempted_ = has_preempted_ || !attempt.preempted.empty();
    attempt.admitted.insert(attempt.admitted.begin(), step.admitted.begin(), step.admitted.end());
    attempt.preempted.insert(attempt.preempted.begin(), step.preempted.begin(), step.preempted.end());
    attempt.is_memory_short = attempt.is_memory_short || step.is_memory_short;
    step = std::move(attempt);
    if (!fits) {
      roll_back();
      accounts_ = accounts;  // as if no attempt had been made: else each would book the last step's drafts
    }
  }
  pool_->end_step(manager_);
  return step;
}

std::string LocalPoolScheduler::obstacle(const common::Request& request, int num_sequences) const {
  const LocalPoolSize& size = pool_->size();
  const bool fits_into_step = num_sequences <= std::min(options().token_budget, options().max_sequences);
  const int num_parts = fits_into_step
                            ? std::min(num_sequences * max_blocks_of_window(size.window, size.block_size),
                                       max_slots_of(request, num_sequences, size.block_size) / size.block_size)
                            : 0;
  if (num_parts <= size.num_parts) {
    return SpeculatingScheduler::obstacle(request, num_sequences);
  }
  // Before the base's reason, which says how many slots would do: with so many, parts may still be missing.
  const bool fits_alone = SpeculatingScheduler::obstacle(request, 1).empty();
  return common::format(
      "%d sequences need up to %d blocks in layers that see %d tokens, which have %d: fewer sequences%s would do, or "
      "more --slots",
      num_sequences, num_parts, size.window, size.num_parts, fits_alone ? "" : " and new tokens");
}

void LocalPoolScheduler::store(int block) noexcept {
  host_cache_->store(manager_.prefix_cache(), block, [&](int host_block) {
    return pool_->will_have_part(manager_, block) && !pool_->will_have_part(manager_, host_block);
  });
}

void LocalPoolScheduler::admit_waiting(ScheduledStep& step) {
  if (!has_preempted_) {
    SpeculatingScheduler::admit_waiting(step);
  }
}

bool LocalPoolScheduler::find_room(SequenceGroup& group, const Admission& admission) {
  const LocalPoolSize& size = pool_->size();
  const int max_window = max_blocks_of_window(size.window, size.block_size);
  // Alone, a group computes as many tokens as there is room for.
  const int room = running().empty() ? std::numeric_limits<int>::max()
                                     : size.num_parts - pool_->num_needed(manager_) - admission.spare_blocks;
  if (group.output().state == RequestState::kSwapped) {
    return static_cast<int>(group.live().size()) * max_window <= room && find_room_in_pool(group, admission);
  }
  if (num_available(manager_) <= admission.spare_blocks) {
    return false;  // before the tokens are hashed
  }
  const std::vector<common::Token> text = common_text(group);
  const std::uint64_t salt = group.request().cache_salt;
  const std::span<const common::Token> known = tokens_to_find(group, text, admission);
  const std::vector<int> hits = manager_.prefix_cache().find(known, salt);
  if (!known.empty() && has_host_cache() && find_room_with_tier(group, text, hits, admission, room)) {
    return true;
  }
  const std::size_t num_shared = pool_->share_parts(manager_, hits);
  if (num_parts_of(text.size(), num_shared, admission) > room) {
    return false;
  }
  if (num_shared == hits.size()) {
    return find_room_in_pool(group, admission);
  }
  const int num_missing = static_cast<int>(text.size()) - static_cast<int>(num_shared) * size.block_size;
  if (!allocate_behind(manager_, group.live().front().sequence, std::span(hits).first(num_shared), salt,
                       std::min(admission.max_tokens, num_missing), admission.spare_blocks)) {
    return false;
  }
  count_lookup(manager_, num_shared);
  return true;
}

bool LocalPoolScheduler::find_room_with_tier(SequenceGroup& group, std::span<const common::Token> text,
                                             std::span<const int> hits, const Admission& admission, int room) {
  const std::size_t num_found = hits.size() * static_cast<std::size_t>(manager_.block_size());
  const std::uint64_t salt = group.request().cache_salt;
  const auto num_usable = [&](std::span<const int> found) {
    std::vector<int> blocks(hits.begin(), hits.end());
    blocks.insert(blocks.end(), found.begin(), found.end());
    const std::size_t num_shared = pool_->share_parts(manager_, blocks);
    return num_shared - std::min(num_shared, hits.size());
  };
  const auto has_parts = [&](std::size_t num_shared) {
    return num_parts_of(text.size(), num_shared, admission) <= room;
  };
  const std::span<const common::Token> rest = text.subspan(num_found);
  const std::size_t num_back = num_usable(host_cache_->find(
      hits.empty() ? 0 : manager_.prefix_cache().entry(hits.back()).text, rest.first(rest.size() - 1), salt));
  if (num_back == 0 || !has_parts(hits.size() + num_back)) {
    return false;
  }
  // What the pool evicts to make room must not take the place of what is found.
  host_cache_->touch(manager_.prefix_cache(), text, salt);
  const SequenceId sequence = group.live().front().sequence;
  if (!allocate_behind(manager_, sequence, hits, salt, std::min(admission.max_tokens, static_cast<int>(rest.size())),
                       admission.spare_blocks)) {
    return false;
  }
  try {
    host_cache_->restore(manager_, sequence, rest, salt, admission, num_usable);
  } catch (const std::bad_alloc&) {  // what has been brought back holds
  }
  // Behind the pool's blocks alone, a window may lack parts.
  const auto num_shared = static_cast<std::size_t>(manager_.length(sequence) / manager_.block_size());
  if (num_shared == hits.size() || !has_parts(num_shared)) {
    manager_.free(sequence);
    return false;
  }
  count_lookup(manager_, hits.size());  // not before: what finds nothing in the tier is looked up in the pool alone
  return true;
}

int LocalPoolScheduler::num_parts_of(std::size_t num_tokens, std::size_t num_shared, const Admission& admission) const {
  const LocalPoolSize& size = pool_->size();
  const auto num_blocks = static_cast<int>(num_shared);
  const int num_missing = static_cast<int>(num_tokens) - num_blocks * size.block_size;
  return std::min(num_blocks, max_blocks_of_window(size.window, size.block_size)) +
         blocks_needed(std::min(admission.max_tokens, num_missing), size.block_size);
}

int LocalPoolScheduler::max_growth() const {
  const int block_size = manager_.block_size();
  int budget = options().token_budget;
  int num_blocks = 0;
  for (const std::shared_ptr<SequenceGroup>& group : running()) {
    group->fork_branches();
    const ScheduledTokens tokens = group->tokens_to_compute();
    for (std::size_t i = 0; i < tokens.sequences.size(); ++i) {
      const int num_tokens = std::min(tokens.num_tokens[i], budget);
      const int length = manager_.length(tokens.sequences[i]);
      const std::vector<int>& table = manager_.block_table(tokens.sequences[i]);
      budget -= num_tokens;
      num_blocks += std::max(
          0, blocks_needed(length + num_tokens + common::kMaxDrafts, block_size) - static_cast<int>(table.size()));
      // A copy on write of a shared block that is not full.
      num_blocks +=
          length % block_size != 0 && manager_.reference_count(table[static_cast<std::size_t>(length / block_size)]) > 1
              ? 1
              : 0;
    }
  }
  return num_blocks;
}

}  // namespace
