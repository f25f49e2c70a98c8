// Older policies, for comparison: static batches, which no request joins before all others have ended, and room that is
// reserved ahead.
#pragma once

#include "../scheduler.h"

namespace stage8 {

class StaticScheduler : public Scheduler {
 public:
  // reserve_ahead: admission allocates the blocks of the longest possible text of the group's first sequence. Others of
  // the group, and what was swapped out, get theirs as they grow.
  StaticScheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache, bool reserve_ahead)
      : Scheduler(manager, options, use_prefix_cache), reserve_ahead_(reserve_ahead) {}

  ScheduledStep schedule() override;

 protected:
  void admit_waiting(ScheduledStep& step) override;
  bool find_room(SequenceGroup& group, const Admission& admission) override;

 private:
  bool reserve_ahead_;
  bool is_open_ = false;          // whether more groups may join the batch
  bool is_memory_short_ = false;  // blocks were missing when the batch was closed, or have been missing since
};

}  // namespace
