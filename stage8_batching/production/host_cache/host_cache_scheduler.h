// A scheduler whose prefix cache has a second tier (host_cache.h): what the pool evicts is kept there, and what a
// request finds there when it is admitted is copied back in front of its first step.
#pragma once

#include <memory>

#include "../speculation/speculating_scheduler.h"
#include "host_cache.h"

namespace stage8 {

class HostCacheScheduler : public SpeculatingScheduler {
 public:
  // Whether moving a block out and in costs less than computing its tokens again; else none is kept.
  static bool pays(const SchedulerOptions& options, int block_size) {
    return options.block_swap_cost < block_size * options.token_compute_cost;
  }

  // The runner that computes the steps carries out the host cache's copies. Null: there is no second tier.
  HostCacheScheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache,
                     int default_drafts, const TokenCost& cost, std::shared_ptr<HostCache> host_cache);

  ScheduledStep schedule() override;

  bool has_host_cache() const { return host_cache_ != nullptr; }
  const HostCache& host_cache() const { return *host_cache_; }

 protected:
  // As HostCache's: before the first block of a step is evicted.
  void take_over_copies();
  // The block is about to be evicted.
  virtual void store(int block) noexcept;
  bool find_room(SequenceGroup& group, const Admission& admission) override;
  // The same without the second tier.
  bool find_room_in_pool(SequenceGroup& group, const Admission& admission) {
    return SpeculatingScheduler::find_room(group, admission);
  }

  std::shared_ptr<HostCache> host_cache_;  // shared with the runner
};

}  // namespace
