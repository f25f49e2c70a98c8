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

// Sets a flag for as long as it lives.
class ScopedFlag {
 public:
  explicit ScopedFlag(bool& flag) : flag_(flag) { flag_ = true; }
  ~ScopedFlag() { flag_ = false; }
  ScopedFlag(const ScopedFlag&) = delete;
  ScopedFlag& operator=(const ScopedFlag&) = delete;

 private:
  bool& flag_;
};

common::SlotUsage slot_usage(const KvCacheManager& manager) {
  const Usage usage = manager.usage();
  return {usage.total, usage.reserved, usage.used, usage.cached};
}

}  // namespace

Server::Server(Engine& engine, const SchedulerOptions& options, Clock& clock)
    : engine_(engine),
      clock_(clock),
      options_(options),
      scheduler_(engine.manager(), options, engine.options().prefix_cache) {
  COMMON_CHECK(options.token_budget <= engine.options().chunk_size, "a step has more tokens than a forward pass");
  COMMON_CHECK(options.max_sequences <= engine.options().max_sequences,
               "a step has more sequences than a forward pass");
}

int Server::submit(const GenerationRequest& request, double arrival) {
  if (const std::string reason = rejection(request); !reason.empty()) {
    return reject(reason, arrival);
  }
  const int id = num_requests();
  RequestState& added = states_.emplace_back();
  added.output.arrival = arrival;
  if (request.beam.has_value()) {
    auto search =
        std::make_unique<BeamSearch>(engine_.manager(), engine_.sequence_ids(), id, request.request, *request.beam);
    added.search = search.get();
    added.group = std::move(search);
  } else {
    auto sampling = std::make_unique<ParallelSampling>(engine_.manager(), engine_.sequence_ids(), id, request.request,
                                                       request.num_samples);
    added.sampling = sampling.get();
    added.group = std::move(sampling);
  }
  scheduler_.add(*added.group);
  return id;
}

int Server::reject(const std::string& reason, double arrival) {
  const int id = num_requests();
  states_.emplace_back().output.arrival = arrival;
  finish(id, common::FinishReason::kRejected, reason);
  return id;
}

void Server::forget(int id) {
  COMMON_CHECK(has_ended(id), "a request is being served");
  state(id).is_forgotten = true;
  state(id).output.completions.clear();
  for (; !states_.empty() && states_.front().is_forgotten; ++num_dropped_) {
    states_.pop_front();
  }
}

void Server::stop(int id, common::FinishReason reason) {
  if (has_ended(id)) {
    return;
  }
  if (in_step_) {
    state(id).stop = reason;  // takes effect at the end of the step; no token is handed out until then
    to_stop_.push_back(id);
  } else {
    finish(id, reason);
  }
}

bool Server::step() {
  if (is_idle()) {
    return false;
  }
  report_ = {};
  report_.index = num_steps_;
  report_.begin = clock_.now();
  const double start = common::now_seconds();
  {
    const ScopedFlag guard(in_step_);
    ScheduledStep scheduled = scheduler_.schedule();
    report_schedule(scheduled);
    report_.usage = slot_usage(engine_.manager());
    report_.scheduling_seconds = common::now_seconds() - start;
    if (scheduled.groups.empty()) {
      COMMON_CHECK(in_flight_.has_value(), "sequences that are not the server's hold the cache");
      collect(0);
    } else {
      compute(std::move(scheduled.groups));
    }
    report_.computing_seconds = common::now_seconds() - start - report_.scheduling_seconds;
  }

  report_.end = clock_.now();
  report_.num_running = static_cast<int>(scheduler_.running().size());
  for (const int id : std::exchange(to_stop_, {})) {
    if (!state(id).output.finished) {
      finish(id, *state(id).stop);
    }
  }
  for (const int id : std::exchange(collected_, {})) {
    const RequestState& served = state(id);
    if (!served.output.finished && served.group->finished()) {
      finish(id,
             served.sampling ? served.sampling->completions().front().finish_reason : common::FinishReason::kLength);
    }
  }
  report_.num_waiting = static_cast<int>(scheduler_.waiting().size());
  report_.ended = std::exchange(ended_, {});
  num_steps_ += 1;
  totals_.add(report_);
  if (on_step_) {
    on_step_(report_);
  }
  return true;
}

std::vector<common::Completion> Server::run(std::span<const common::Request> requests,
                                            const common::OnToken& on_token) {
  const int first = num_requests();
  const ScopedOnToken guard(*this, [&](int id, int, common::Token token) { on_token(id - first, token); });
  for (const common::Request& request : requests) {
    submit({request});
  }
  while (step()) {
  }
  std::vector<common::Completion> completions;
  for (int id = first; id < num_requests(); ++id) {
    const RequestOutput& result = output(id);
    completions.push_back(result.completions.empty() ? common::Completion{} : result.completions.front());
    completions.back().finish_reason = result.finish_reason;
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
  if (request.beam.has_value() && !std::isfinite(request.beam->length_penalty)) {
    return "the length penalty is not a number";
  }
  const int num_sequences = request.beam ? request.beam->width : request.num_samples;
  if (num_sequences < 1 || num_sequences > scheduler_.max_group_size()) {
    return common::format("%d sequences at once, and a step has room for 1 to %d", num_sequences,
                          scheduler_.max_group_size());
  }
  // It must fit when it is alone: then it can always be served once all later arrivals are preempted.
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

// One forward pass for all groups. If it throws, it is not known which request is at fault: each is computed again
// alone, and fails if its own pass throws.
void Server::compute(std::vector<ScheduledGroup> groups) {
  InFlightStep step(engine_.manager(), std::move(groups));
  try {
    if (on_pass_) {
      on_pass_(step.batch());
    }
    step.enqueue(engine_, in_flight_ ? &*in_flight_ : nullptr);
  } catch (const std::exception& error) {
    collect(step.is_enqueued() ? 1 : 0);
    for (const ScheduledGroup& scheduled : step.groups()) {
      if (goes_on(scheduled.id) && step.groups().size() > 1) {
        compute({scheduled});
      } else if (goes_on(scheduled.id)) {
        finish(scheduled.id, common::FinishReason::kFailed, error.what());
      }
    }
    return;
  }
  // While a GPU computes this step, the previous one is collected: its tokens are inputs of this one.
  step.batch().resolve_pending(collect(1));
  clock_.step_computed(step.batch().num_tokens());
  engine_.commit(step.batch());
  const std::vector<int>& lengths = step.batch().context_lengths;
  report_.num_read = std::accumulate(lengths.begin(), lengths.end(), report_.num_read);
  report_.usage = slot_usage(engine_.manager());
  int row = 0;
  for (const ScheduledGroup& scheduled : step.groups()) {
    if (goes_on(scheduled.id)) {
      scheduled.group->on_computed();
      if (step.draws_tokens() && scheduled.num_rows() > 0 && scheduled.group->can_run_ahead()) {
        scheduled.group->push_placeholder(row);
      }
    }
    row += scheduled.num_rows();
  }
  const bool runs_ahead = step.can_run_ahead() && options_.run_ahead.value_or(engine_.gpu() != nullptr);
  in_flight_ = std::move(step);
  if (!runs_ahead) {
    collect(0);
  }
}

// Collects the step in flight, if there is one, and lets its requests go on. Returns its tokens if it draws any.
std::vector<common::Token> Server::collect(int step_age) {
  if (!in_flight_.has_value()) {
    return {};
  }
  InFlightStep step = std::move(*in_flight_);
  in_flight_.reset();
  try {
    step.collect(engine_, step_age);
  } catch (const std::exception&) {
    try {
      step.collect(engine_, step_age);  // waiting changes nothing, so that it can be repeated
    } catch (const std::exception& error) {
      for (const ScheduledGroup& scheduled : step.groups()) {
        if (!has_ended(scheduled.id)) {
          finish(scheduled.id, common::FinishReason::kFailed, error.what());
        }
      }
      return std::vector<common::Token>(step.batch().logits_rows.size());  // of requests that have ended
    }
  }
  report_.waiting_seconds += step.waiting_seconds();
  int row = 0;
  for (const ScheduledGroup& scheduled : step.groups()) {
    if (!has_ended(scheduled.id)) {
      collected_.push_back(scheduled.id);
      try {
        deliver(step, scheduled, row);
      } catch (const std::exception& error) {
        finish(scheduled.id, common::FinishReason::kFailed, error.what());
      }
    }
    row += scheduled.num_rows();
  }
  return step.tokens();
}

void Server::deliver(const InFlightStep& step, const ScheduledGroup& scheduled, int row) {
  if (state(scheduled.id).stop.has_value() || scheduled.num_rows() == 0) {
    return;
  }
  if (step.draws_tokens()) {
    const auto drawn =
        std::span(step.tokens()).subspan(static_cast<std::size_t>(row), static_cast<std::size_t>(scheduled.num_rows()));
    if (scheduled.group->placeholder_row().has_value()) {
      scheduled.group->resolve_placeholder(drawn.front());
    } else {
      scheduled.group->take_tokens(drawn);
    }
  } else {
    const auto first = step.logits().begin() + row;
    scheduled.group->take({first, first + scheduled.num_rows()});
  }
  hand_out_tokens(scheduled.id);
}

void Server::hand_out_tokens(int id) {
  RequestState& served = state(id);
  if (served.sampling == nullptr) {  // a search knows its best text only at the end
    return;
  }
  std::vector<common::Completion>& reported = served.output.completions;
  const std::vector<common::Completion>& written = served.sampling->completions();
  reported.resize(written.size());
  for (std::size_t sample = 0; sample < written.size(); ++sample) {
    const bool has_token = written[sample].tokens.size() > reported[sample].tokens.size();
    reported[sample].finish_reason = written[sample].finish_reason;
    if (has_token) {
      reported[sample].tokens.push_back(written[sample].tokens.back());
    }
    if (written[sample].logprobs.size() > reported[sample].logprobs.size()) {
      reported[sample].logprobs.push_back(written[sample].logprobs.back());
    }
    if (has_token && sample == 0) {
      served.output.token_times.push_back(clock_.now());
    }
    if (has_token && on_token_) {
      on_token_(id, static_cast<int>(sample), written[sample].tokens.back());
    }
  }
}

void Server::finish(int id, common::FinishReason reason, const std::string& error) {
  RequestState& ended = state(id);
  RequestOutput& result = ended.output;
  if (ended.search != nullptr) {
    result.hypotheses = ended.search->hypotheses();
    for (const Hypothesis& hypothesis : result.hypotheses) {
      result.completions.push_back({hypothesis.tokens, hypothesis.finish_reason, ""});
    }
  }
  result.finish_reason = reason;
  result.error = error;
  result.end = clock_.now();
  result.finished = true;
  ended_.push_back(id);
  if (ended.group != nullptr) {
    scheduler_.remove(*ended.group);
    ended.group.reset();
  }
}

void Server::report_schedule(const ScheduledStep& step) {
  report_.num_tokens = step.num_tokens;
  report_.is_memory_short = step.is_memory_short;
  for (const ScheduledGroup& scheduled : step.groups) {
    const std::vector<int>& counts = scheduled.tokens.num_tokens;
    const bool had_part = std::exchange(state(scheduled.id).lacks_tokens, !scheduled.tokens.with_logits);
    report_.is_chunk.insert(report_.is_chunk.end(), counts.size(), had_part || !scheduled.tokens.with_logits);
    report_.num_queries.insert(report_.num_queries.end(), counts.begin(), counts.end());
    report_.served.push_back(scheduled.id);
    report_.num_served.push_back(std::accumulate(counts.begin(), counts.end(), 0));
  }
  for (const SequenceGroup* group : step.admitted) {
    RequestState& admitted = state(group->id());
    report_.admitted.push_back(group->id());
    if (admitted.output.admission < 0.0) {
      admitted.output.admission = report_.begin;
    }
  }
  for (const auto& [group, swapped] : step.preempted) {
    (swapped ? report_.swapped_out : report_.recomputed).push_back(group->id());
    state(group->id()).output.preemptions += 1;
  }
}

}  // namespace
