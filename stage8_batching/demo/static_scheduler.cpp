#include "static_scheduler.h"

namespace stage8 {

ScheduledStep StaticScheduler::schedule() {
  is_open_ = is_open_ || running().empty();
  is_memory_short_ = is_memory_short_ && !is_open_;
  ScheduledStep step = Scheduler::schedule();
  is_memory_short_ = is_memory_short_ || step.is_memory_short;
  step.is_memory_short = is_memory_short_ && !waiting().empty();
  return step;
}

void StaticScheduler::admit_waiting(ScheduledStep& step) {
  if (!is_open_) {
    return;
  }
  Scheduler::admit_waiting(step);
  // A batch is as large as memory allows: it stays open if only the step's budget is used up.
  is_open_ = budget_left(step) == 0 && !waiting().empty();
}

bool StaticScheduler::find_room(SequenceGroup& group, const Admission& admission) {
  const bool is_swapped = group.output().state == RequestState::kSwapped;
  if (!Scheduler::find_room(group, admission)) {
    return false;
  }
  const SequenceId first = group.sequences().front();
  if (reserve_ahead_ && !is_swapped && !manager_.reserve(first, group.max_tokens() - manager_.length(first))) {
    group.free_blocks();
    return false;
  }
  return true;
}

}  // namespace
