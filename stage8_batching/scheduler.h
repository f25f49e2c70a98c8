// Decides which requests run in the next step. Integers only: no floats and no model. First come, first served: of all
// unfinished requests the earliest arrivals run, and a step schedules none while an earlier one lacks budget or blocks.
//
//   running   A B C        every step: the running ones in order, then from the queue while budget and blocks last
//   waiting   D E F        a block is missing for B: C, the latest, is preempted, and is the first to be resumed
#pragma once

#include <algorithm>
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
  // Blocks that admission leaves free for each running sequence. With 0 the cache is fuller, but groups are more often
  // admitted only to be preempted in the next step.
  int headroom = 1;
  Preemption preemption = Preemption::kRecompute;
  // kAuto swaps if that costs less than computing again. Costs of moving a block out and in, and of computing a token,
  // in any common unit.
  std::int64_t block_swap_cost = 1;
  std::int64_t token_compute_cost = 1;
  // Whether a step is scheduled and enqueued before the tokens of the previous step are known, so that a GPU does not
  // wait for the host. A stop token is then noticed one step late. Absent: on a GPU only.
  std::optional<bool> run_ahead = std::nullopt;

  // Older ways of serving, to compare with. Admit no group before the whole batch has ended:
  bool static_batches = false;
  // Reserve the blocks of a group's longest possible text on admission:
  bool reserve_ahead = false;
};

// What a step computes for one group. tokens.with_logits: all that the cache lacks, so that there are logits to go on
// from.
struct ScheduledGroup {
  int id = 0;                      // the request's
  SequenceGroup* group = nullptr;  // destroyed if the request ends while the step is in flight
  ScheduledTokens tokens;

  // How many rows of logits the group gets: one per sequence, or none.
  int num_rows() const { return tokens.with_logits ? static_cast<int>(tokens.sequences.size()) : 0; }
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
  // Whether requests wait because blocks are missing, and not for the budget or for the limit on sequences.
  bool is_memory_short = false;
};

class Scheduler {
 public:
  // The manager must outlive the scheduler, and a group must not be destroyed before it is removed.
  Scheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache = true);

  // Puts the group at the end of the queue. CheckError if it is larger than max_group_size().
  void add(SequenceGroup& group);
  // Removes the group, running or waiting, and frees its blocks.
  void remove(SequenceGroup& group);

  // Decides on the next step, and reserves its slots. The whole step must be computed and committed before the next
  // call.
  ScheduledStep schedule();

  // The max sequences of a group that can run when it is alone, within the limits of a step.
  int max_group_size() const { return std::min(options_.token_budget, options_.max_sequences); }

  const KvCacheManager& manager() const { return manager_; }
  const std::vector<SequenceGroup*>& running() const { return running_; }
  const std::deque<SequenceGroup*>& waiting() const { return waiting_; }

 private:
  int budget_left(const ScheduledStep& step) const { return options_.token_budget - step.num_tokens; }
  // Schedules running_[index]. Returns false if it gets less than the cache lacks: then no later group gets anything.
  bool schedule_group(std::size_t index, ScheduledStep& step);
  bool schedule_last_tokens(std::size_t index, ScheduledTokens tokens, ScheduledStep& step);
  bool schedule_chunks(std::size_t index, ScheduledTokens tokens, ScheduledStep& step);
  void admit_waiting(ScheduledStep& step);
  bool find_room(SequenceGroup& group, const Admission& admission);
  // Preempts the latest running arrival. Returns false if that is running_[index] itself.
  bool preempt_latest(std::size_t index, ScheduledStep& step);
  bool is_swap_cheaper(std::span<const SequenceId> sequences) const;

  KvCacheManager& manager_;
  SchedulerOptions options_;
  bool use_prefix_cache_;
  std::vector<SequenceGroup*> running_;  // both in order of arrival, and all running before all waiting
  std::deque<SequenceGroup*> waiting_;
  int num_sequences_ = 0;  // max sequences of the running groups
  bool filling_ = false;   // whether a static batch is still open to new groups
  // Whether blocks were missing in this step or, for a static batch, when it was closed.
  bool lacks_blocks_ = false;
};

}  // namespace
