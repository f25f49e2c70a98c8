#include "scheduler.h"

#include <algorithm>

#include "common/base/check.h"

namespace stage8 {

Scheduler::Scheduler(KvCacheManager& manager, const SchedulerOptions& options) : manager_(manager), options_(options) {
  COMMON_CHECK(options.token_budget > 0 && options.max_sequences > 0, "a step computes something");
}

void Scheduler::add(Group& group) {
  COMMON_CHECK(fits(group), "the group can never run");
  waiting_.push_back(&group);
}

void Scheduler::remove(Group& group) {
  if (std::erase(running_, &group) > 0) {
    num_sequences_ -= group.most_sequences();
  } else {
    std::erase(waiting_, &group);
  }
  group.stop();
}

bool Scheduler::fits(const Group& group) const {
  return group.most_sequences() <= std::min(options_.token_budget, options_.max_sequences);
}

Step Scheduler::schedule() {
  Step step;
  bool all_served = true;
  filling_ = filling_ || running_.empty();
  // Preemption shortens the list from its end, behind the index.
  for (std::size_t i = 0; all_served && i < running_.size(); ++i) {
    all_served = serve(i, step);
  }
  // Whoever has just given way does not come back in the same step.
  if (all_served && step.preempted.empty() && (filling_ || !options_.static_batches)) {
    admit(step);
  }
  return step;
}

bool Scheduler::serve(std::size_t index, Step& step) {
  Work work = running_[index]->work();
  if (work.sequences.empty()) {
    return true;
  }
  return work.with_logits && work.sequences.size() > 1 ? serve_whole(index, work, step)
                                                       : serve_chunks(index, std::move(work), step);
}

bool Scheduler::serve_whole(std::size_t index, const Work& work, Step& step) {
  const auto count = static_cast<int>(work.sequences.size());
  if (count > budget_left(step)) {
    return false;
  }
  while (!manager_.can_reserve(work.sequences, 1)) {
    if (!preempt_behind(index, step)) {
      return false;  // it keeps what it has, unless an earlier one needs it
    }
  }
  for (const SequenceId sequence : work.sequences) {
    COMMON_CHECK(manager_.reserve(sequence, 1), "can_reserve promised it");
  }
  step.num_tokens += count;
  step.shares.push_back({running_[index], work});
  return true;
}

bool Scheduler::serve_chunks(std::size_t index, Work work, Step& step) {
  bool all_served = true;
  std::size_t num_served = 0;
  for (; all_served && num_served < work.sequences.size(); ++num_served) {
    const int wanted = work.num_tokens[num_served];
    int count = std::min(wanted, budget_left(step));
    while (count > 0 && !manager_.reserve(work.sequences[num_served], count)) {
      count -= preempt_behind(index, step) ? 0 : 1;
    }
    work.num_tokens[num_served] = count;
    step.num_tokens += count;
    all_served = count == wanted;
    if (count == 0) {
      break;
    }
  }
  work.sequences.resize(num_served);
  work.num_tokens.resize(num_served);
  work.with_logits = work.with_logits && all_served;
  if (num_served > 0) {
    step.shares.push_back({running_[index], std::move(work)});
  }
  return all_served;
}

void Scheduler::admit(Step& step) {
  bool is_refused = false;
  while (!waiting_.empty() && budget_left(step) > 0 && !is_refused) {
    Group& group = *waiting_.front();
    const Admission admission{budget_left(step), options_.headroom * num_sequences_};
    is_refused = num_sequences_ + group.most_sequences() > options_.max_sequences || !let_in(group, admission);
    if (!is_refused) {
      waiting_.pop_front();
      running_.push_back(&group);
      num_sequences_ += group.most_sequences();
      step.admitted.push_back(&group);
      if (!serve(running_.size() - 1, step)) {
        break;
      }
    }
  }
  // A static batch is as large as memory allows; that a step's budget is used up closes it not.
  filling_ = filling_ && !is_refused && budget_left(step) == 0 && !waiting_.empty();
}

bool Scheduler::let_in(Group& group, const Admission& admission) {
  if (const std::vector<SequenceId> swapped = group.sequences(); !swapped.empty()) {
    return manager_.swap_in(swapped, admission.spare_blocks);
  }
  if (!group.start(admission)) {
    return false;
  }
  const SequenceId first = group.sequences().front();
  if (options_.reserve_ahead && !manager_.reserve(first, group.most_tokens() - manager_.length(first))) {
    group.stop();
    return false;
  }
  return true;
}

bool Scheduler::preempt_behind(std::size_t index, Step& step) {
  if (running_.size() == index + 1) {
    return false;
  }
  Group& latest = *running_.back();
  const std::vector<SequenceId> sequences = latest.sequences();
  const bool swapped = options_.preemption != Preemption::kRecompute &&
                       (options_.preemption == Preemption::kSwap || is_swap_cheaper(sequences)) &&
                       manager_.swap_out(sequences);  // there may be no room for it
  if (!swapped) {
    latest.stop();
  }
  running_.pop_back();
  waiting_.push_front(&latest);
  num_sequences_ -= latest.most_sequences();
  step.preempted.push_back({&latest, swapped});
  return true;
}

bool Scheduler::is_swap_cheaper(std::span<const SequenceId> sequences) const {
  const Usage holding = manager_.holding(sequences);
  return holding.reserved / manager_.block_size() * options_.block_swap_cost <
         holding.used * options_.token_compute_cost;
}

}  // namespace
