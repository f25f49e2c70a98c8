#include "server.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <span>
#include <utility>

#include "cache_size.h"
#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"

namespace stage8 {

Server::Server(Engine& engine, const SchedulerOptions& options, Clock& clock)
    : Server(engine, clock, std::make_unique<Scheduler>(engine.manager(), options, engine.options().prefix_cache)) {}

Server::Server(Engine& engine, Clock& clock, std::unique_ptr<Scheduler> scheduler)
    : engine_(engine), clock_(clock), scheduler_(std::move(scheduler)), reporter_(*scheduler_) {
  const SchedulerOptions& options = scheduler_->options();
  COMMON_CHECK(options.token_budget <= engine.options().chunk_size, "a step has more tokens than a forward pass");
  COMMON_CHECK(options.max_sequences <= engine.options().max_sequences,
               "a step has more sequences than a forward pass");
}

int Server::submit(const GenerationRequest& request, TokenSink sink, std::optional<double> arrival) {
  if (const std::string reason = rejection(request); !reason.empty()) {
    return reject(reason, arrival.value_or(clock_.now()));
  }
  const int id = num_requests();
  std::shared_ptr<SequenceGroup> group;
  if (request.beam.has_value()) {
    group = std::make_shared<BeamSearch>(engine_.manager(), engine_.sequence_ids(), id, request.request, *request.beam);
  } else {
    group = std::make_shared<ParallelSampling>(engine_.manager(), engine_.sequence_ids(), id, request.request,
                                               request.num_samples, std::move(sink));
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

int Server::reject(const std::string& reason, double arrival) {
  const int id = num_requests();
  expect_end();
  // A request without a prompt, which ends before it enters the queue.
  requests_.push_back(
      std::make_shared<ParallelSampling>(engine_.manager(), engine_.sequence_ids(), id, common::Request{}, 1));
  requests_.back()->output().arrival = arrival;
  end(*requests_.back(), common::FinishReason::kRejected, reason);
  return id;
}

void Server::forget(int id) {
  COMMON_CHECK(output(id).finished(), "a request is being served");
  requests_[static_cast<std::size_t>(id - num_dropped_)].reset();
  for (; !requests_.empty() && requests_.front() == nullptr; ++num_dropped_) {
    requests_.pop_front();
  }
}

void Server::stop(int id, common::FinishReason reason) { end(find(id), reason); }

bool Server::step() {
  if (is_idle()) {
    return false;
  }
  reporter_.begin(clock_.now());
  try {
    const ScheduledStep scheduled = scheduler_->schedule();
    note_admissions(scheduled);
    report_schedule(scheduled);
    if (scheduled.groups.empty()) {
      COMMON_CHECK(
          in_flight_.has_value(),
          "schedule() computes nothing although requests wait: sequences that are not the server's hold the cache "
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

std::vector<common::Completion> Server::run(std::span<const common::Request> requests,
                                            const common::OnToken& on_token) {
  const int first = num_requests();
  for (const common::Request& request : requests) {
    submit({request}, [&, first](int id, int, common::Token token) { on_token(id - first, token); });
  }
  const int last = num_requests();
  try {
    while (step()) {
    }
  } catch (...) {
    for (int id = first; id < last; ++id) {
      stop(id, common::FinishReason::kCancelled);
    }
    throw;
  }
  std::vector<common::Completion> completions;
  for (int id = first; id < last; ++id) {
    const RequestOutput& result = output(id);
    completions.push_back(result.completions.empty() ? common::Completion{} : result.completions.front());
    completions.back().finish_reason = *result.finish_reason;
    completions.back().error = result.error;
  }
  return completions;
}

std::vector<common::Counter> Server::counters() const {
  std::vector<common::Counter> counters = counters_of(reporter_.totals());
  const std::vector<common::Counter> of_engine = engine_.counters();
  counters.insert(counters.end(), of_engine.begin(), of_engine.end());
  return counters;
}

std::string Server::rejection(const GenerationRequest& request) const {
  if (std::string reason = engine_.rejection(request.request); !reason.empty()) {
    return reason;
  }
  const common::LlamaConfig& config = engine_.model().config();
  for (const common::Token token : request.request.prompt) {
    if (token < 0 || token >= config.vocab_size) {
      return common::format("token %d is not in the vocabulary", token);
    }
  }
  if (std::string reason = common::problem_of(request.request.sampling); !reason.empty()) {
    return reason;
  }
  if (request.request.num_logprobs < 0) {
    return "logprobs must be at least 0";
  }
  if (request.beam.has_value() &&
      !(std::isfinite(request.beam->length_penalty) && request.beam->length_penalty >= 0.0)) {
    return "the length penalty is below 0 or not a number";
  }
  const int num_sequences = request.beam ? request.beam->width : request.num_samples;
  if (num_sequences < 1 || num_sequences > scheduler_->max_group_size()) {
    return common::format("%d sequences at once, and a step has room for 1 to %d", num_sequences,
                          scheduler_->max_group_size());
  }
  // The request must fit when it runs alone: then it can be served once all later arrivals are preempted.
  const int block_size = engine_.manager().block_size();
  const int slots = max_slots_of(request.request, num_sequences, block_size);
  if (const int total = engine_.manager().usage().total / block_size; slots / block_size > total) {
    return common::format(
        "the request needs up to %d blocks, and the whole cache has %d (%d slots): --slots %d would do, or fewer new "
        "tokens or sequences",
        slots / block_size, total, total * block_size, slots);
  }
  return "";
}

void Server::compute(const std::vector<ScheduledGroup>& groups) {
  std::optional<std::string> error = forward(groups);
  if (!error.has_value()) {
    return;
  }
  for (const ScheduledGroup& scheduled : groups) {
    if (groups.size() > 1 && !scheduled.group->finished()) {
      error = forward({scheduled});
    }
    if (error.has_value()) {
      end(*scheduled.group, common::FinishReason::kFailed, *error);
    }
  }
}

std::optional<std::string> Server::forward(std::vector<ScheduledGroup> groups) {
  std::optional<Step> step;
  std::string error;
  try {
    step = prepare(std::move(groups));
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  // While a GPU computes this step, the previous one is collected: its tokens are inputs of this one.
  const std::vector<common::Token> drawn = collect();
  if (!step.has_value()) {
    return error;
  }
  step->confirm(engine_.manager(), drawn);
  clock_.step_computed(step->batch().num_tokens());
  reporter_.computed(step->batch());
  in_flight_ = std::move(step);
  if (!in_flight_->runs_ahead()) {
    collect();
  }
  return std::nullopt;
}

Step Server::prepare(std::vector<ScheduledGroup> groups) {
  Step step(engine_.manager(), std::move(groups));
  const RaggedBatch& batch = batch_to_compute(step);
  if (on_pass_) {
    on_pass_(batch);
  }
  step.enqueue(engine_, batch, may_run_ahead(step));
  return step;
}

std::vector<common::Token> Server::collect() {
  if (!in_flight_.has_value()) {
    return {};
  }
  Step step = std::move(*in_flight_);
  in_flight_.reset();
  try {
    step.collect(engine_);
  } catch (const std::exception& error) {
    for (const ScheduledGroup& scheduled : step.groups()) {
      end(*scheduled.group, common::FinishReason::kFailed, error.what());
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
        end(group, common::FinishReason::kFailed, error.what());
      }
    }
    row += scheduled.num_rows();
  }
  return std::move(step.tokens());
}

bool Server::may_run_ahead(const Step& step) const {
  return step.can_run_ahead() && scheduler_->options().run_ahead.value_or(engine_.runner().is_asynchronous());
}

void Server::extend(const Step& step, const ScheduledGroup& scheduled, int row) {
  scheduled.group->extend(step.result(row, scheduled.num_rows()), clock_.now());
}

void Server::note_admissions(const ScheduledStep& step) {
  for (const ScheduledGroup& scheduled : step.groups) {
    RequestOutput& output = scheduled.group->output();
    if (output.admission < 0.0) {
      output.admission = reporter_.report().begin;
      output.cached_tokens = engine_.manager().length(scheduled.group->live().front().sequence);
    }
  }
}

void Server::expect_end() { reporter_.expect_end(scheduler_->running().size() + scheduler_->waiting().size() + 1); }

// Does nothing if the request has ended already.
void Server::end(SequenceGroup& group, common::FinishReason reason, std::string error) {
  if (group.output().finished()) {
    return;
  }
  scheduler_->remove(group);
  group.end(reason, std::move(error), clock_.now());
  reporter_.ended(group.id());
}

SequenceGroup& Server::find(int id) const {
  const int index = id - num_dropped_;
  COMMON_CHECK(
      index >= 0 && index < static_cast<int>(requests_.size()) && requests_[static_cast<std::size_t>(index)] != nullptr,
      "no such request, or it has been forgotten");
  return *requests_[static_cast<std::size_t>(index)];
}

}  // namespace
