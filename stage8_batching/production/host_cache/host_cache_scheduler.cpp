#include "host_cache_scheduler.h"

#include <new>
#include <utility>
#include <vector>

namespace stage8 {

HostCacheScheduler::HostCacheScheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache,
                                       int default_drafts, const TokenCost& cost, std::shared_ptr<HostCache> host_cache)
    : SpeculatingScheduler(manager, options, use_prefix_cache, default_drafts, cost),
      host_cache_(std::move(host_cache)) {
  if (has_host_cache() && pays(options, manager.block_size())) {
    manager.on_evict([this](int block) { store(block); });
  }
}

ScheduledStep HostCacheScheduler::schedule() {
  take_over_copies();
  return SpeculatingScheduler::schedule();
}

void HostCacheScheduler::take_over_copies() {
  if (has_host_cache()) {
    host_cache_->take_over_copies(manager_);
  }
}

void HostCacheScheduler::store(int block) noexcept { host_cache_->store(manager_.prefix_cache(), block); }

bool HostCacheScheduler::find_room(SequenceGroup& group, const Admission& admission) {
  const bool looks_up =
      admission.use_prefix_cache && group.request().num_scored == 0 && group.output().state != RequestState::kSwapped;
  const SequenceId first = group.live().front().sequence;
  if (looks_up) {
    // What the pool evicts to make room must not take the place of what the request will find.
    const std::size_t num_known = group.request().prompt.size() + group.live().front().tokens.size();
    host_cache_->touch(manager_.prefix_cache(), group.tokens(first, 0, static_cast<int>(num_known)),
                       group.request().cache_salt);
  }
  if (!find_room_in_pool(group, admission)) {
    return false;
  }
  if (looks_up) {
    try {
      const int missing = group.tokens_to_compute().num_tokens.front();
      host_cache_->restore(manager_, first, group.tokens(first, manager_.length(first), missing),
                           group.request().cache_salt, admission);
    } catch (const std::bad_alloc&) {  // the request computes what was not brought back
      manager_.release_reserved(first);
    }
  }
  return true;
}

}  // namespace
