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
namespace {

common::SlotUsage slot_usage(const KvCacheManager& manager) {
  const Usage usage = manager.usage();
  return {usage.total, usage.reserved, usage.used, usage.cached};
}

}  // namespace

Server::Server(Engine& engine, const SchedulerOptions& options, Clock& clock)
    : Server(engine, clock, std::make_unique<Scheduler>(engine.manager(), options, engine.options().prefix_cache)) {}

Server::Server(Engine& engine, Clock& clock, std::unique_ptr<Scheduler> scheduler)
    : engine_(engine), clock_(clock), scheduler_(std::move(scheduler)) {
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
  requests_.push_back(group);
  scheduler_->add(std::move(group));
  return id;
}

int Server::reject(const std::string& reason, double arrival) {
  const int id = num_requests();
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
  const double begin = begin_report();
  const ScheduledStep scheduled = scheduler_->schedule();
  report_schedule(scheduled, begin);
  if (scheduled.groups.empty()) {
    COMMON_CHECK(
        in_flight_.has_value(),
        "schedule() computes nothing although requests wait: sequences that are not the server's hold the cache "
        "(manager().sequences()), or the scheduler refuses what fits (budget, max_sequences, headroom) or does "
        "not free the blocks of what it preempts");
    collect(0);
  } else {
    compute(scheduled.groups);
  }
  end_report(begin);
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
  std::vector<common::Counter> counters = counters_of(totals_);
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
  InFlightStep step(engine_.manager(), std::move(groups));
  const RaggedBatch& batch = batch_to_compute(step);
  std::optional<std::string> error;
  try {
    if (on_pass_) {
      on_pass_(batch);
    }
    engine_.forward(batch);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  // While a GPU computes this step, the previous one is collected: its tokens are inputs of this one.
  const std::vector<common::Token> drawn = collect(error.has_value() ? 0 : 1);
  if (error.has_value()) {
    return error;
  }
  step.batch().resolve_pending(drawn);
  engine_.commit(step.batch());  // except for requests that have just ended
  report_pass(batch);
  const bool runs_ahead = may_run_ahead(step);
  int row = 0;
  for (const ScheduledGroup& scheduled : step.groups()) {
    if (!scheduled.group->finished()) {
      scheduled.group->on_computed();
      if (runs_ahead && scheduled.num_rows() > 0) {
        scheduled.group->run_ahead(row);
      }
    }
    row += scheduled.num_rows();
  }
  in_flight_ = std::move(step);
  if (!runs_ahead) {
    collect(0);
  }
  return std::nullopt;
}

std::vector<common::Token> Server::collect(int step_age) {
  if (!in_flight_.has_value()) {
    return {};
  }
  InFlightStep step = std::move(*in_flight_);
  in_flight_.reset();
  try {
    step.collect(engine_.runner(), step_age);
  } catch (const std::exception& error) {
    for (const ScheduledGroup& scheduled : step.groups()) {
      end(*scheduled.group, common::FinishReason::kFailed, error.what());
    }
    return std::vector<common::Token>(step.batch().logits_rows.size());  // their requests have ended
  }
  report_.waiting_seconds += step.waiting_seconds();
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
  return step.tokens();
}

bool Server::may_run_ahead(const InFlightStep& step) const {
  return step.can_run_ahead() && scheduler_->options().run_ahead.value_or(engine_.runner().is_asynchronous());
}

void Server::extend(const InFlightStep& step, const ScheduledGroup& scheduled, int row) {
  scheduled.group->extend(step.result(row, scheduled.num_rows()), clock_.now());
}

// Does nothing if the request has ended already.
void Server::end(SequenceGroup& group, common::FinishReason reason, const std::string& error) {
  if (group.output().finished()) {
    return;
  }
  scheduler_->remove(group);
  group.end(reason, error, clock_.now());
  ended_.push_back(group.id());
}

SequenceGroup& Server::find(int id) const {
  const int index = id - num_dropped_;
  COMMON_CHECK(
      index >= 0 && index < static_cast<int>(requests_.size()) && requests_[static_cast<std::size_t>(index)] != nullptr,
      "no such request, or it has been forgotten");
  return *requests_[static_cast<std::size_t>(index)];
}

double Server::begin_report() {
  report_ = {};
  report_.index = num_steps_;
  report_.begin = clock_.now();
  return common::now_seconds();
}

void Server::report_schedule(const ScheduledStep& step, double begin) {
  report_.num_tokens = step.num_tokens;
  report_.is_memory_short = step.is_memory_short;
  report_.num_running = static_cast<int>(scheduler_->running().size());
  for (const ScheduledGroup& scheduled : step.groups) {
    const std::vector<int>& counts = scheduled.tokens.num_tokens;
    const bool is_chunk = scheduled.group->begin_chunk(scheduled.tokens.with_logits);
    report_.is_chunk.insert(report_.is_chunk.end(), counts.size(), is_chunk);
    report_.num_queries.insert(report_.num_queries.end(), counts.begin(), counts.end());
    report_.served.push_back(scheduled.group->id());
    report_.num_served.push_back(std::accumulate(counts.begin(), counts.end(), 0));
  }
  for (SequenceGroup* group : step.admitted) {
    report_.admitted.push_back(group->id());
    if (group->output().admission < 0.0) {
      group->output().admission = report_.begin;
      group->output().cached_tokens = engine_.manager().length(group->live().front().sequence);
    }
  }
  for (const auto& [group, swapped] : step.preempted) {
    (swapped ? report_.swapped_out : report_.recomputed).push_back(group->id());
    group->output().preemptions += 1;
  }
  report_.usage = slot_usage(engine_.manager());
  report_.scheduling_seconds = common::now_seconds() - begin;
}

void Server::report_pass(const RaggedBatch& batch) {
  clock_.step_computed(batch.num_tokens());
  report_.num_read = std::accumulate(batch.context_lengths.begin(), batch.context_lengths.end(), report_.num_read);
  report_.usage = slot_usage(engine_.manager());
}

void Server::end_report(double begin) {
  report_.computing_seconds = common::now_seconds() - begin - report_.scheduling_seconds;
  report_.end = clock_.now();
  report_.num_waiting = static_cast<int>(scheduler_->waiting().size());
  report_.ended = std::exchange(ended_, {});
  num_steps_ += 1;
  totals_.add(report_);
  if (on_step_) {
    on_step_(report_);
  }
}

}  // namespace
