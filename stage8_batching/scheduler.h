// Which requests run in the next step, in integers: no floats and no model. First come, first served, in this sense: of
// all requests that have not ended, those that run are the earliest arrivals, and a step schedules none while an
// earlier one lacks budget or blocks.
//
//   running   A B C        every step: the running ones in order, then from the queue while budget and blocks last
//   waiting   D E F        a block is missing for B: C, the latest, is preempted, and is the first to be resumed
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "decoding.h"
#include "kv_cache_manager.h"

namespace stage8 {

enum class Preemption { kRecompute, kSwap, kAuto };

struct SchedulerOptions {
  int token_budget = 256;  // max tokens in a step
  int max_sequences = 64;  // that run at once
  // Admission leaves so many free blocks for each sequence that runs already. With 0 the cache is fuller, and a group
  // is more often admitted only to be preempted in the next step.
  int headroom = 1;
  Preemption preemption = Preemption::kRecompute;
  // kAuto swaps if that costs less than computing again. In any unit: to move a block out and in, to compute a token.
  std::int64_t block_swap_cost = 1;
  std::int64_t token_compute_cost = 1;
  // A step is scheduled and enqueued before the tokens of the one before it are known, so that a GPU does not wait for
  // the host. That a request has ended by a stop token is found out a step late. Absent: on a GPU.
  std::optional<bool> run_ahead = std::nullopt;

  // What serving was like before, to compare with. No group is admitted before all of a batch have ended:
  bool static_batches = false;
  // and each gets room for the longest text that was asked for, at once.
  bool reserve_ahead = false;
};

// What one group gets of a step. with_logits: all that it lacks is computed, and the logits are there.
struct ScheduledGroup {
  SequenceGroup* group = nullptr;
  ScheduledTokens tokens;
};

struct ScheduledStep {
  struct Preempted {
    SequenceGroup* group = nullptr;
    bool swapped = false;
  };
  std::vector<ScheduledGroup> groups;  // in order of arrival
  std::vector<SequenceGroup*> admitted;
  std::vector<Preempted> preempted;
  int num_tokens = 0;
};

class Scheduler {
 public:
  // The manager must outlive the scheduler, and every group its time in here.
  Scheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache = true);

  // At the end of the queue. The group must fit when it is alone: fits().
  void add(SequenceGroup& group);
  // Ends it, running or waiting, and gives its blocks back.
  void remove(SequenceGroup& group);

  // Decides on the next step, and reserves the slots for it. All of it has to be computed before the next call.
  ScheduledStep schedule();

  // Whether the step's limits allow the group at all.
  bool fits(const SequenceGroup& group) const;

  const KvCacheManager& manager() const { return manager_; }
  const std::vector<SequenceGroup*>& running() const { return running_; }
  const std::deque<SequenceGroup*>& waiting() const { return waiting_; }

 private:
  int budget_left(const ScheduledStep& step) const { return options_.token_budget - step.num_tokens; }
  // The running group of this index. False if it got less than it lacks: then no later one gets anything.
  bool schedule_group(std::size_t index, ScheduledStep& step);
  bool schedule_last_tokens(std::size_t index, ScheduledTokens tokens, ScheduledStep& step);
  bool schedule_chunks(std::size_t index, ScheduledTokens tokens, ScheduledStep& step);
  void admit_waiting(ScheduledStep& step);
  bool find_room(SequenceGroup& group, const Admission& admission);
  // Preempts the latest arrival, if it is later than the running group of this index.
  bool preempt_latest(std::size_t index, ScheduledStep& step);
  bool is_swap_cheaper(std::span<const SequenceId> sequences) const;

  KvCacheManager& manager_;
  SchedulerOptions options_;
  bool use_prefix_cache_;
  std::vector<SequenceGroup*> running_;  // both in order of arrival; all that run came before all that wait
  std::deque<SequenceGroup*> waiting_;
  int num_sequences_ = 0;  // that the running groups have at most
  bool filling_ = false;   // a static batch, which is open while its prompts are computed
};

}  // namespace
