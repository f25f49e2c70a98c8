#include "scheduler.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"

namespace stage8 {

int max_slots_of(const common::Request& request, int num_sequences, int block_size) {
  const auto prompt_length = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t shared = prompt_length / block_size;
  const std::int64_t blocks = (prompt_length + request.max_new_tokens - 1 + block_size - 1) / block_size;
  const std::int64_t slots = (shared + num_sequences * (blocks - shared)) * block_size;
  return static_cast<int>(std::min<std::int64_t>(slots, std::numeric_limits<int>::max() / 2));
}

Scheduler::Scheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache)
    : manager_(manager), options_(options), use_prefix_cache_(use_prefix_cache) {
  COMMON_CHECK(options.token_budget > 0 && options.max_sequences > 0,
               "a step has room for at least one token and one sequence");
  running_.reserve(static_cast<std::size_t>(options.max_sequences));  // so that an admission can't fail half-way
}

void Scheduler::add(std::shared_ptr<SequenceGroup> group) { waiting_.push_back(std::move(group)); }

void Scheduler::remove(SequenceGroup& group) {
  const auto is_group = [&](const std::shared_ptr<SequenceGroup>& listed) { return listed.get() == &group; };
  if (std::erase_if(running_, is_group) > 0) {
    num_sequences_ -= group.max_sequences();
  } else {
    std::erase_if(waiting_, is_group);
  }
  group.free_blocks();
}

std::string Scheduler::obstacle(const common::Request& request, int num_sequences) const {
  const int max_sequences = std::min(options_.token_budget, options_.max_sequences);
  if (num_sequences < 1 || num_sequences > max_sequences) {
    return common::format("%d sequences at once, and a step has room for 1 to %d", num_sequences, max_sequences);
  }
  const int block_size = manager_.block_size();
  const int slots = max_slots_of(request, num_sequences, block_size);
  if (const int total = manager_.usage().total / block_size; slots / block_size > total) {
    return common::format(
        "the request needs up to %d blocks, and the whole cache has %d (%d slots): --slots %d would do, or fewer new "
        "tokens or sequences",
        slots / block_size, total, total * block_size, slots);
  }
  return "";
}

ScheduledStep Scheduler::schedule() {
  ScheduledStep step;
  bool all_scheduled = true;
  // Preemption shortens running_ from its end, never below i + 1.
  for (std::size_t i = 0; all_scheduled && i < running_.size(); ++i) {
    all_scheduled = schedule_group(i, step);
  }
  // A group that has just been preempted is not resumed in the same step.
  if (all_scheduled && step.preempted.empty()) {
    admit_waiting(step);
  }
  step.is_memory_short = step.is_memory_short && !waiting_.empty();
  return step;
}

void Scheduler::roll_back() {
  for (const std::shared_ptr<SequenceGroup>& group : running_) {
    for (const Branch& branch : group->live()) {
      if (manager_.contains(branch.sequence)) {
        manager_.release_reserved(branch.sequence);
      }
    }
  }
}

bool Scheduler::schedule_group(std::size_t index, ScheduledStep& step) {
  running_[index]->fork_branches();
  ScheduledTokens tokens = running_[index]->tokens_to_compute();
  if (tokens.sequences.empty()) {
    return true;
  }
  return tokens.with_logits && tokens.sequences.size() > 1 ? schedule_last_tokens(index, std::move(tokens), step)
                                                           : schedule_chunks(index, std::move(tokens), step);
}

bool Scheduler::schedule_last_tokens(std::size_t index, ScheduledTokens tokens, ScheduledStep& step) {
  const auto count = static_cast<int>(tokens.sequences.size());
  if (count > budget_left(step)) {
    return false;
  }
  while (!manager_.can_reserve(tokens.sequences, 1)) {
    if (!preempt_latest(index, step)) {
      return false;  // the group keeps its blocks unless an earlier one needs them
    }
  }
  for (const SequenceId sequence : tokens.sequences) {
    COMMON_CHECK(manager_.reserve(sequence, 1), "can_reserve() found room for it");
  }
  step.num_tokens += count;
  step.groups.push_back({running_[index], std::move(tokens)});
  return true;
}

bool Scheduler::schedule_chunks(std::size_t index, ScheduledTokens tokens, ScheduledStep& step) {
  bool all_scheduled = true;
  std::size_t num_scheduled = 0;
  for (; all_scheduled && num_scheduled < tokens.sequences.size(); ++num_scheduled) {
    const int missing = tokens.num_tokens[num_scheduled];
    int count = std::min(missing, budget_left(step));
    while (!manager_.reserve(tokens.sequences[num_scheduled], count)) {
      if (!preempt_latest(index, step)) {
        count = manager_.max_reservable(tokens.sequences[num_scheduled]);
      }
    }
    tokens.num_tokens[num_scheduled] = count;
    step.num_tokens += count;
    all_scheduled = count == missing;
    if (count == 0) {
      break;
    }
  }
  tokens.sequences.resize(num_scheduled);
  tokens.num_tokens.resize(num_scheduled);
  tokens.with_logits = tokens.with_logits && all_scheduled;
  if (num_scheduled > 0) {
    step.groups.push_back({running_[index], std::move(tokens)});
  }
  return all_scheduled;
}

void Scheduler::admit_waiting(ScheduledStep& step) {
  bool is_refused = false;
  while (!waiting_.empty() && budget_left(step) > 0 && !is_refused) {
    SequenceGroup& group = *waiting_.front();
    const Admission admission{budget_left(step), options_.headroom * num_sequences_, use_prefix_cache_};
    const bool has_place = num_sequences_ + group.max_sequences() <= options_.max_sequences;
    is_refused = !has_place || !find_room(group, admission);
    step.is_memory_short = has_place && is_refused;
    if (!is_refused) {
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
      group.output().state = RequestState::kRunning;
      num_sequences_ += group.max_sequences();
      step.admitted.push_back(&group);
      if (!schedule_group(running_.size() - 1, step)) {
        break;
      }
    }
  }
}

bool Scheduler::find_room(SequenceGroup& group, const Admission& admission) {
  if (group.output().state == RequestState::kSwapped) {
    return manager_.swap_in(group.sequences(), admission.spare_blocks);
  }
  return group.allocate(admission);
}

bool Scheduler::preempt_latest(std::size_t index, ScheduledStep& step) {
  step.is_memory_short = true;
  if (running_.size() == index + 1) {
    return false;
  }
  SequenceGroup& latest = *running_.back();
  // What may throw comes first: until here, the group has lost nothing.
  step.preempted.push_back({&latest, false});
  waiting_.push_front(running_.back());
  const bool swapped = swap_out(latest);
  if (!swapped) {
    latest.free_blocks();
  }
  running_.pop_back();
  latest.output().state = swapped ? RequestState::kSwapped : RequestState::kWaiting;
  latest.output().preemptions += 1;
  num_sequences_ -= latest.max_sequences();
  step.preempted.back().swapped = swapped;
  return true;
}

bool Scheduler::swap_out(const SequenceGroup& group) {
  if (options_.preemption == Preemption::kRecompute) {
    return false;
  }
  try {
    const std::vector<SequenceId> sequences = group.sequences();
    return (options_.preemption == Preemption::kSwap || is_swap_cheaper(sequences)) && manager_.swap_out(sequences);
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool Scheduler::is_swap_cheaper(std::span<const SequenceId> sequences) const {
  const Usage usage = manager_.usage_of(sequences);
  return usage.reserved / manager_.block_size() * options_.block_swap_cost < usage.used * options_.token_compute_cost;
}

}  // namespace
