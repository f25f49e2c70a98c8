#include "engine.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/message.h"
#include "common/base/text.h"
#include "make_runner.h"

namespace stage8 {
namespace {

// Checks the options before a runner is built from them.
const EngineOptions& checked(const EngineOptions& options) {
  COMMON_CHECK(options.scheduler.token_budget > 0, "a step has room for at least one token");
  COMMON_CHECK(options.scheduler.max_sequences > 0, "a step has room for at least one sequence");
  return options;
}

}  // namespace

Engine::Engine(const common::Llama& model, const EngineOptions& options)
    : Engine(model, options, make_runner(model, checked(options))) {}

Engine::Engine(const common::Llama& model, const EngineOptions& options, std::unique_ptr<Runner> runner, Clock& clock,
               const MakeScheduler& make_scheduler)
    : model_(model),
      options_(checked(options)),
      runner_(std::move(runner)),
      manager_(cache().num_blocks, cache().block_size, hash_block, cache().num_host_blocks),
      clock_(clock),
      scheduler_(make_scheduler ? make_scheduler(manager_, options.scheduler, options.prefix_cache)
                                : std::make_unique<Scheduler>(manager_, options.scheduler, options.prefix_cache)),
      reporter_(*scheduler_) {
  options_.num_slots = options.num_slots.value_or(cache().num_blocks * cache().block_size);
}

std::vector<common::Completion> Engine::run(std::span<const common::Request> requests,
                                            const common::OnToken& on_token) {
  const int first = num_requests();
  const int last = first + static_cast<int>(requests.size());
  const auto forget_all = [&] {
    for (int id = first; id < std::min(last, num_requests()); ++id) {
      stop(id, common::FinishReason::kCancelled);
      forget(id);
    }
  };
  std::vector<common::Completion> completions;
  try {
    for (const common::Request& request : requests) {
      submit({request}, [&, first](int id, int, common::Token token) { on_token(id - first, token); });
    }
    while (step()) {
    }
    for (int id = first; id < last; ++id) {
      const RequestOutput& result = output(id);
      completions.push_back(result.completions.empty() ? common::Completion{} : result.completions.front());
      completions.back().finish_reason = *result.finish_reason;
      completions.back().error = result.error;
    }
  } catch (...) {
    forget_all();
    throw;
  }
  forget_all();
  return completions;
}

int Engine::submit(const GenerationRequest& request, TokenSink sink, std::optional<double> arrival) {
  if (const std::string reason = rejection(request); !reason.empty()) {
    return reject(reason, arrival.value_or(clock_.now()));
  }
  const int id = num_requests();
  std::shared_ptr<SequenceGroup> group;
  if (request.length_penalty.has_value()) {
    group = std::make_shared<BeamSearch>(manager_, sequence_ids_, id, request.request,
                                         BeamOptions{request.num_samples, *request.length_penalty});
  } else {
    group = std::make_shared<ParallelSampling>(manager_, sequence_ids_, id, request.request, request.num_samples,
                                               std::move(sink));
  }
  group->output().arrival = arrival.value_or(clock_.now());
  expect_end();
  requests_.push_back(group);
  try {
    scheduler_->add(std::move(group));
  } catch (...) {
    requests_.pop_back();
    throw;
  }
  return id;
}

int Engine::reject(const std::string& reason, double arrival) {
  const int id = num_requests();
  expect_end();
  // A request without a prompt, which ends before it enters the queue.
  requests_.push_back(std::make_shared<ParallelSampling>(manager_, sequence_ids_, id, common::Request{}, 1));
  requests_.back()->output().arrival = arrival;
  end(*requests_.back(), common::FinishReason::kRejected, reason);
  return id;
}

void Engine::stop(int id, common::FinishReason reason) { end(find(id), reason); }

void Engine::forget(int id) {
  COMMON_CHECK(output(id).finished(), "a request is being served");
  requests_[static_cast<std::size_t>(id - num_dropped_)].reset();
  for (; !requests_.empty() && requests_.front() == nullptr; ++num_dropped_) {
    requests_.pop_front();
  }
}

int Engine::context_length() const { return max_context(model_.config(), options_); }

std::vector<common::Counter> Engine::counters() const {
  const PrefixStatistics& prefix = manager_.prefix_cache().statistics();
  const std::int64_t kv_bytes_read = reporter_.totals().num_read * cache().bytes_per_slot;
  std::vector<common::Counter> counters = counters_of(reporter_.totals());
  counters.insert(counters.end(), {{"forward_passes", static_cast<double>(forward_passes_)},
                                   {"slots_total", static_cast<double>(*options_.num_slots)},
                                   {"kv_bytes_per_token", static_cast<double>(cache().bytes_per_slot)},
                                   {"kv_bytes_read", static_cast<double>(kv_bytes_read)},
                                   {"blocks_copied", static_cast<double>(blocks_copied_)},
                                   {"prefix_lookups", static_cast<double>(prefix.lookups)},
                                   {"prefix_hits", static_cast<double>(prefix.hits)},
                                   {"prefix_tokens_saved", static_cast<double>(prefix.tokens_saved)},
                                   {"prefix_evictions", static_cast<double>(prefix.evictions)}});
  return counters;
}

std::string Engine::rejection(const GenerationRequest& generation) const {
  const common::Request& request = generation.request;
  const auto prompt_length = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t length = prompt_length + request.max_new_tokens;
  if (request.prompt.empty()) {
    return "the prompt is empty";
  }
  if (request.max_new_tokens < 1) {
    return "no new tokens are requested";
  }
  if (length > context_length()) {
    const bool is_models = context_length() == model_.config().context_length;
    std::string reason = common::format("a prompt of %lld tokens and %d new ones are more than the %s of %d",
                                        static_cast<long long>(prompt_length), request.max_new_tokens,
                                        is_models ? "model's context" : "--context-length", context_length());
    if (prompt_length < context_length()) {
      reason += common::format("; %lld new ones fit", static_cast<long long>(context_length() - prompt_length));
    }
    return reason;
  }
  for (const common::Token token : request.prompt) {
    if (token < 0 || token >= model_.config().vocab_size) {
      return common::format("token %d is not in the vocabulary", token);
    }
  }
  if (std::string reason = common::problem_of(request.sampling); !reason.empty()) {
    return reason;
  }
  if (request.num_logprobs < 0) {
    return "logprobs must be at least 0";
  }
  if (const double penalty = generation.length_penalty.value_or(0.0); !(std::isfinite(penalty) && penalty >= 0.0)) {
    return "the length penalty is below 0 or not a number";
  }
  return scheduler_->obstacle(request, generation.num_samples);
}

bool Engine::step() {
  if (is_idle()) {
    return false;
  }
  reporter_.begin(clock_.now());
  try {
    const ScheduledStep scheduled = scheduler_->schedule();
    note_admissions(scheduled);
    reporter_.scheduled(scheduled);
    if (scheduled.groups.empty()) {
      COMMON_CHECK(
          in_flight_.has_value(),
          "schedule() computes nothing although requests wait: sequences that are not the engine's hold the cache "
          "(manager().sequences()), or the scheduler refuses what fits (budget, max_sequences, headroom) or does "
          "not free the blocks of what it preempts");
      collect();
    } else {
      compute(scheduled.groups);
    }
  } catch (...) {
    scheduler_->roll_back();
    throw;
  }
  reporter_.end(clock_.now());
  return true;
}

void Engine::compute(const std::vector<ScheduledGroup>& groups) {
  std::optional<std::string> error = try_compute(groups);
  if (!error.has_value()) {
    return;
  }
  for (const ScheduledGroup& scheduled : groups) {
    if (groups.size() > 1 && !scheduled.group->finished()) {
      error = try_compute({scheduled});
    }
    if (error.has_value()) {
      end(*scheduled.group, common::FinishReason::kFailed, *error);
    }
  }
}

std::optional<std::string> Engine::try_compute(std::vector<ScheduledGroup> groups) {
  std::optional<Step> step;
  std::string error;
  try {
    step = prepare(std::move(groups));
  } catch (const std::exception& thrown) {
    error = common::message_of(thrown);
  }
  // While a GPU computes this step, the previous one is collected: its tokens are inputs of this one.
  const std::vector<common::Token> drawn = collect();
  if (!step.has_value()) {
    return error;
  }
  step->confirm(manager_, drawn);
  clock_.step_computed(step->batch().num_tokens());
  reporter_.computed(step->batch());
  in_flight_ = std::move(step);
  if (!in_flight_->runs_ahead()) {
    collect();
  }
  return std::nullopt;
}

Step Engine::prepare(std::vector<ScheduledGroup> groups) {
  Step step(manager_, std::move(groups));
  step.enqueued(forward(step.batch()), step.batch().logits_rows.size(), may_run_ahead(step));
  return step;
}

std::vector<common::Token> Engine::collect() {
  if (!in_flight_.has_value()) {
    return {};
  }
  Step step = std::move(*in_flight_);
  in_flight_.reset();
  try {
    step.collect(*runner_);
    if (options_.prefix_cache) {
      step.publish(manager_);
    }
  } catch (const std::exception& error) {
    for (const ScheduledGroup& scheduled : step.groups()) {
      end(*scheduled.group, common::FinishReason::kFailed, common::message_of(error));
    }
    return {};
  }
  reporter_.report().waiting_seconds += step.waiting_seconds();
  int row = 0;
  for (const ScheduledGroup& scheduled : step.groups()) {
    SequenceGroup& group = *scheduled.group;
    if (scheduled.num_rows() > 0 && !group.finished()) {
      try {
        extend(step, scheduled, row);
        if (group.finished()) {
          end(group, group.output().completions.front().finish_reason);
        }
      } catch (const std::exception& error) {
        end(group, common::FinishReason::kFailed, common::message_of(error));
      }
    }
    row += scheduled.num_rows();
  }
  return std::move(step.tokens());
}

bool Engine::may_run_ahead(const Step& step) const {
  return step.can_run_ahead() && scheduler_->options().run_ahead.value_or(runner_->is_asynchronous());
}

void Engine::extend(const Step& step, const ScheduledGroup& scheduled, int row) {
  scheduled.group->extend(step.result(row, scheduled.num_rows()), clock_.now());
}

void Engine::note_admissions(const ScheduledStep& step) {
  for (const ScheduledGroup& scheduled : step.groups) {
    RequestOutput& output = scheduled.group->output();
    if (output.admission < 0.0) {
      output.admission = reporter_.report().begin;
      output.cached_tokens = manager_.length(scheduled.group->live().front().sequence);
    }
  }
}

void Engine::expect_end() { reporter_.expect_end(scheduler_->running().size() + scheduler_->waiting().size() + 1); }

// Does nothing if the request has ended already.
void Engine::end(SequenceGroup& group, common::FinishReason reason, std::string error) {
  if (group.output().finished()) {
    return;
  }
  scheduler_->remove(group);
  group.end(reason, std::move(error), clock_.now());
  reporter_.ended(group.id());
}

SequenceGroup& Engine::find(int id) const {
  const int index = id - num_dropped_;
  COMMON_CHECK(
      index >= 0 && index < static_cast<int>(requests_.size()) && requests_[static_cast<std::size_t>(index)] != nullptr,
      "no such request, or it has been forgotten");
  return *requests_[static_cast<std::size_t>(index)];
}

StepId Engine::forward(const RaggedBatch& batch) {
  if (on_pass_) {
    on_pass_(batch);
  }
  while (!manager_.pending_copies().empty()) {
    const std::span<const BlockCopy> copies = independent_copies(manager_.pending_copies());
    runner_->copy_blocks(copies);
    blocks_copied_ += static_cast<std::int64_t>(copies.size());
    manager_.clear_pending_copies(copies.size());  // later copies may overwrite what these have read
  }

  const StepId step = runner_->enqueue(batch);
  forward_passes_ += 1;
  return step;
}

}  // namespace
