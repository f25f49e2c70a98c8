// Decides which requests run in the next step. Integers only: no floats and no model. First come, first served: the
// earliest of the unfinished requests run, and a step schedules no request while an earlier one lacks budget or blocks.
//
//   running   A B C        every step: first the running ones in order, then the queue while budget and blocks last
//   waiting   D E F        a block is missing for B: C, the latest, is preempted, and is the first to be resumed
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decoding.h"
#include "kv_cache_manager.h"

namespace stage8 {

enum class Preemption { kRecompute, kSwap, kAuto };

struct SchedulerOptions {
  int token_budget = 256;  // max tokens in a step
  int max_sequences = 64;  // max sequences that run at once
  // Admission leaves at least headroom * n blocks without an owner, for running sequences to grow into. n is the sum of
  // max_sequences() of the groups that run already; the new group does not count, so that alone it may fill the cache.
  // With 0 the cache is fuller, but more groups are admitted and then preempted in the next step.
  int headroom = 1;
  Preemption preemption = Preemption::kRecompute;
  // kAuto swaps if swapping costs less than computing again. The costs of moving a block out and in, and of computing a
  // token, in any common unit.
  std::int64_t block_swap_cost = 1;
  std::int64_t token_compute_cost = 1;
  // Whether a step is scheduled and enqueued before the tokens of the previous step are known, so that a GPU does not
  // wait for the host. A stop token is then noticed one step late. Absent: on a GPU only.
  std::optional<bool> run_ahead = std::nullopt;
};

// What a step computes for one group. tokens.with_logits: everything that the cache lacks, so that the step ends with
// logits.
struct ScheduledGroup {
  std::shared_ptr<SequenceGroup> group;  // shared: the request may end, and be forgotten, while the step is in flight
  ScheduledTokens tokens;

  // How many rows of logits the group gets: one per sequence, or none.
  int num_rows() const { return tokens.with_logits ? static_cast<int>(tokens.sequences.size()) : 0; }
};

struct ScheduledStep {
  struct Preempted {
    SequenceGroup* group = nullptr;
    bool swapped = false;  // whether its blocks really moved to the host, not whether they were meant to
  };
  std::vector<ScheduledGroup> groups;  // by arrival, earliest first
  std::vector<SequenceGroup*> admitted;
  std::vector<Preempted> preempted;
  int num_tokens = 0;
  // Whether requests wait because blocks are missing, and not because of the budget or the limit on sequences: a
  // running group found no block, or the first of the queue was refused for want of blocks.
  bool is_memory_short = false;
};

// The slots that a request needs when it runs alone and its sequences share only the prompt's full blocks. The last
// token of a text is never stored.
int max_slots_of(const common::Request& request, int num_sequences, int block_size);

class Scheduler {
 public:
  // The manager must outlive the scheduler.
  Scheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache = true);
  virtual ~Scheduler() = default;
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Puts the group at the end of the queue. Its request must have no obstacle(): else it never ends, nor do later ones.
  void add(std::shared_ptr<SequenceGroup> group);
  // Removes the group, running or waiting, and frees its blocks.
  void remove(SequenceGroup& group);

  // Decides on the next step, and reserves its slots. Before the next call, the whole step must have been confirmed
  // (Step::confirm): computed or, if steps run ahead, at least enqueued.
  virtual ScheduledStep schedule();
  // Undoes the reservations of a step that never was. Requests that it admitted run, and those that it preempted wait:
  // both can be computed in the next step.
  void roll_back();

  // Why the request can't run even alone; empty if it can: then it is served once all later arrivals are preempted.
  virtual std::string obstacle(const common::Request& request, int num_sequences) const;

  const KvCacheManager& manager() const { return manager_; }
  const SchedulerOptions& options() const { return options_; }
  const std::vector<std::shared_ptr<SequenceGroup>>& running() const { return running_; }
  const std::deque<std::shared_ptr<SequenceGroup>>& waiting() const { return waiting_; }

 protected:
  int budget_left(const ScheduledStep& step) const { return options_.token_budget - step.num_tokens; }
  // Starts waiting groups, in order of arrival, until the budget is used up or the first of the queue is refused: it
  // has too many sequences or finds too few blocks. Schedules what it starts, and stops after a group that got less
  // than the cache lacks.
  virtual void admit_waiting(ScheduledStep& step);
  // Allocates blocks for the group's swapped sequences, or for as much of its prompt as the step may compute. Returns
  // false and changes nothing if there are too few blocks.
  virtual bool find_room(SequenceGroup& group, const Admission& admission);

  KvCacheManager& manager_;

 private:
  // Schedules running_[index]. Returns false if it gets less than its tokens_to_compute(): then no later group gets
  // anything.
  bool schedule_group(std::size_t index, ScheduledStep& step);
  // Schedules one token for each of several sequences, or nothing at all. Looks at the budget first: without budget, no
  // group is preempted.
  bool schedule_last_tokens(std::size_t index, ScheduledTokens tokens, ScheduledStep& step);
  // Schedules as many tokens of each sequence, in order, as budget and blocks allow. For missing blocks it preempts;
  // only if there is no later group does it take fewer tokens. After a sequence that got too little, no further one
  // gets any.
  bool schedule_chunks(std::size_t index, ScheduledTokens tokens, ScheduledStep& step);
  // Preempts the running group that arrived last: all its sequences lose their blocks, and it is the first of the
  // queue. Returns false if that is running_[index] itself. In either case blocks are missing: is_memory_short.
  bool preempt_latest(std::size_t index, ScheduledStep& step);
  // Moves the group's blocks to the host if the options say so. Returns false and changes nothing if they do not, or if
  // the host has no room, or no memory to plan it.
  bool swap_out(const SequenceGroup& group);
  bool is_swap_cheaper(std::span<const SequenceId> sequences) const;

  SchedulerOptions options_;
  bool use_prefix_cache_;
  // Both in order of arrival, and all running before all waiting.
  std::vector<std::shared_ptr<SequenceGroup>> running_;
  std::deque<std::shared_ptr<SequenceGroup>> waiting_;
  int num_sequences_ = 0;  // sum of max_sequences() of the running groups: changes with every change of running_
};

// Makes a scheduler of another kind than the engine's own.
using MakeScheduler = std::function<std::unique_ptr<Scheduler>(KvCacheManager& manager, const SchedulerOptions& options,
                                                               bool use_prefix_cache)>;

}  // namespace
