// Who runs in the next step, in integers: no floats and no model. First come, first served, in this sense: of all
// requests that have not ended, those that run are the earliest arrivals, and no step serves one while an earlier one
// goes short.
//
//   running   A B C        every step: the running ones in order, then from the queue while budget and blocks last
//   waiting   D E F        a block is missing for B: C, the latest, gives way and is the first to come back
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "kv_cache_manager.h"

namespace stage8 {

// Tokens of some sequences of one request, the next ones of each.
struct Work {
  std::vector<SequenceId> sequences;
  std::vector<int> num_tokens;  // by sequence, at least 1
  // The logits after the last of them are wanted. For several sequences: one token each, all in the same step.
  bool with_logits = false;
};

// A request as the scheduler sees it: sequences that are let in, computed and driven out together.
class Group {
 public:
  virtual ~Group() = default;

  virtual int most_sequences() const = 0;  // at any time
  virtual int most_tokens() const = 0;     // in one sequence, at any time

  // Those that the manager knows, in the cache or swapped out.
  virtual std::vector<SequenceId> sequences() const = 0;
  // Of a group that is in the cache: what has to be computed next. Empty only while its last token is on its way.
  virtual Work work() const = 0;

  // Gets its first sequence into the cache. False if there is no room on these terms; nothing has changed then.
  virtual bool start(const Admission& admission) = 0;
  // Gives all its blocks back, wherever they are; what was computed has to be computed again.
  virtual void stop() = 0;
};

enum class Preemption { kRecompute, kSwap, kAuto };

struct SchedulerOptions {
  int token_budget = 256;  // the most tokens in a step
  int max_sequences = 64;  // that run at once
  // Who is let in leaves so many free blocks for each sequence that runs already. With 0 the cache is fuller, and more
  // often somebody is let in only to be thrown out again in the next step.
  int headroom = 1;
  Preemption preemption = Preemption::kRecompute;
  // kAuto swaps if that costs less than computing again. In any unit: to move a block out and in, to compute a token.
  std::int64_t block_swap_cost = 1;
  std::int64_t token_compute_cost = 1;
  // A step is scheduled and ordered before the tokens of the one before it are known, so that a GPU does not wait for
  // the host. Whoever ends by a stop token is found out a step late. Absent: on a GPU.
  std::optional<bool> run_ahead = std::nullopt;

  // What serving was like before, to compare with. Nobody is let in before all of a batch have ended:
  bool static_batches = false;
  // and everybody is given room for the longest text that was asked for, at once.
  bool reserve_ahead = false;
};

// What one group gets of a step. with_logits: all of its work is done, and the logits are there.
struct Share {
  Group* group = nullptr;
  Work work;
};

struct Step {
  struct Preempted {
    Group* group = nullptr;
    bool swapped = false;
  };
  std::vector<Share> shares;  // in order of arrival
  std::vector<Group*> admitted;
  std::vector<Preempted> preempted;
  int num_tokens = 0;
};

class Scheduler {
 public:
  // The manager must outlive the scheduler, and every group its time in here.
  Scheduler(KvCacheManager& manager, const SchedulerOptions& options);

  // At the end of the queue. The group must fit when it is alone: fits().
  void add(Group& group);
  // Ends it, whatever it is at. Its blocks come back.
  void remove(Group& group);

  // Decides on the next step, and finds the slots for it. All of it has to be computed before the next call.
  Step schedule();

  // Whether the step's limits allow the group at all.
  bool fits(const Group& group) const;

  const KvCacheManager& manager() const { return manager_; }
  const std::vector<Group*>& running() const { return running_; }
  const std::deque<Group*>& waiting() const { return waiting_; }

 private:
  int budget_left(const Step& step) const { return options_.token_budget - step.num_tokens; }
  // The share of the running group of this index. False if it wanted more: nobody behind it gets anything then.
  bool serve(std::size_t index, Step& step);
  bool serve_whole(std::size_t index, const Work& work, Step& step);
  bool serve_chunks(std::size_t index, Work work, Step& step);
  void admit(Step& step);
  bool let_in(Group& group, const Admission& admission);
  // The latest arrival gives way, if it is later than this one.
  bool preempt_behind(std::size_t index, Step& step);
  bool is_swap_cheaper(std::span<const SequenceId> sequences) const;

  KvCacheManager& manager_;
  SchedulerOptions options_;
  std::vector<Group*> running_;  // both in order of arrival; whoever runs came before whoever waits
  std::deque<Group*> waiting_;
  int num_sequences_ = 0;  // that the running groups have at most
  bool filling_ = false;   // a static batch, which is open while its prompts are computed
};

}  // namespace
