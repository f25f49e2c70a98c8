#include "server.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <utility>

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

}  // namespace

Server::Server(Engine& engine, const SchedulerOptions& options, Clock& clock)
    : engine_(engine),
      clock_(clock),
      options_(options),
      scheduler_(engine.manager(), options, engine.options().prefix_cache) {}

int Server::submit(const GenerationRequest& request, double arrival) {
  if (const std::string reason = rejection(request); !reason.empty()) {
    return reject(reason, arrival);
  }
  const int id = num_requests();
  RequestState& added = states_.emplace_back();
  added.output.arrival = arrival;
  if (request.beam.has_value()) {
    auto search =
        std::make_unique<BeamSearch>(engine_.manager(), engine_.sequence_ids(), request.request, *request.beam);
    added.search = search.get();
    added.group = std::move(search);
  } else {
    auto sampling = std::make_unique<ParallelSampling>(engine_.manager(), engine_.sequence_ids(), request.request,
                                                       request.num_samples);
    added.sampling = sampling.get();
    added.group = std::move(sampling);
  }
  ids_[added.group.get()] = id;
  scheduler_.add(*added.group);
  return id;
}

int Server::reject(const std::string& reason, double arrival) {
  const int id = num_requests();
  states_.emplace_back().output.arrival = arrival;
  finish(id, common::FinishReason::kRejected, reason);
  return id;
}

void Server::stop(int id, common::FinishReason reason) {
  if (state(id).output.finished) {
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
  report_.index = totals_.steps;
  report_.begin = clock_.now();
  const double start = common::now_seconds();
  {
    const ScopedFlag guard(in_step_);
    ScheduledStep scheduled = scheduler_.schedule();
    report_schedule(scheduled);
    report_.usage = engine_.manager().usage();
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
  totals_.add(report_);
  if (on_step_) {
    on_step_(report_);
  }
  return true;
}

std::vector<common::Completion> Server::run(std::span<const common::Request> requests,
                                            const common::OnToken& on_token) {
  const int first = num_requests();
  on_token_ = [&](int id, int, common::Token token) { on_token(id - first, token); };
  for (const common::Request& request : requests) {
    submit({request});
  }
  while (step()) {
  }
  on_token_ = nullptr;
  std::vector<common::Completion> completions;
  for (int id = first; id < num_requests(); ++id) {
    const RequestOutput& result = output(id);
    completions.push_back(result.completions.empty() ? common::Completion{} : result.completions.front());
    completions.back().finish_reason = result.finish_reason;
    completions.back().error = result.error;
  }
  return completions;
}

std::string Server::rejection(const GenerationRequest& request) const {
  const auto prompt_length = static_cast<int>(request.request.prompt.size());
  if (std::string reason = engine_.rejection(prompt_length, request.request.max_new_tokens); !reason.empty()) {
    return reason;
  }
  const common::LlamaConfig& config = engine_.model().config();
  for (const common::Token token : request.request.prompt) {
    if (token < 0 || token >= config.vocab_size) {
      return common::format("token %d is not in the vocabulary", token);
    }
  }
  if (request.beam.has_value() && !std::isfinite(request.beam->length_penalty)) {
    return "the length penalty is not a number";
  }
  const int num_sequences = request.beam ? request.beam->width : request.num_samples;
  const int max_sequences = std::min(options_.token_budget, options_.max_sequences);
  if (num_sequences < 1 || num_sequences > max_sequences) {
    return common::format("%d sequences at once, and a step has room for 1 to %d", num_sequences, max_sequences);
  }
  // It must fit when it is alone and its sequences share nothing but the prompt's full blocks: then it can always be
  // served once all later arrivals are preempted. The last token of a text is never stored.
  const int block_size = engine_.manager().block_size();
  const int length = prompt_length + request.request.max_new_tokens - 1;
  const int shared = prompt_length / block_size;
  const std::int64_t needed = shared + std::int64_t{num_sequences} * (blocks_needed(length, block_size) - shared);
  if (const int total = engine_.manager().usage().total / block_size; needed > total) {
    return common::format("the request needs up to %lld blocks, and the whole cache has %d",
                          static_cast<long long>(needed), total);
  }
  return "";
}

// One forward pass for all groups. If it throws, it is not known which request is at fault: each is computed again
// alone, and fails if its own pass throws.
void Server::compute(std::vector<ScheduledGroup> groups) {
  std::vector<ScheduledRequest> requests;
  for (ScheduledGroup& scheduled : groups) {
    const int id = id_of(scheduled.group);
    requests.push_back({id, scheduled.group, state(id).sampling, std::move(scheduled.tokens)});
  }
  InFlightStep step(engine_.manager(), std::move(requests));
  try {
    step.batch().on_layer = on_layer_;
    if (on_pass_) {
      on_pass_(step.batch());
    }
    step.enqueue(engine_, in_flight_ ? &*in_flight_ : nullptr);
  } catch (const std::exception& error) {
    collect(step.is_enqueued() ? 1 : 0);
    for (const ScheduledRequest& request : step.requests()) {
      if (goes_on(request.id) && step.requests().size() > 1) {
        compute({{request.group, request.tokens}});
      } else if (goes_on(request.id)) {
        finish(request.id, common::FinishReason::kFailed, error.what());
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
  report_.usage = engine_.manager().usage();
  int row = 0;
  for (const ScheduledRequest& request : step.requests()) {
    if (goes_on(request.id)) {
      request.group->on_computed();
      if (step.is_greedy() && request.num_rows() > 0) {
        request.sampling->push_placeholder(row);
      }
    }
    row += request.num_rows();
  }
  const bool runs_ahead = step.is_greedy() && options_.run_ahead.value_or(engine_.gpu() != nullptr);
  in_flight_ = std::move(step);
  if (!runs_ahead) {
    collect(0);
  }
}

// Collects the step in flight, if there is one, and lets its requests go on. Returns its tokens if it is greedy.
std::vector<common::Token> Server::collect(int step_age) {
  if (!in_flight_.has_value()) {
    return {};
  }
  InFlightStep step = std::move(*in_flight_);
  in_flight_.reset();
  step.collect(engine_, step_age);
  report_.waiting_seconds += step.waiting_seconds();
  int row = 0;
  for (const ScheduledRequest& request : step.requests()) {
    if (!state(request.id).output.finished) {
      collected_.push_back(request.id);
      try {
        deliver(step, request, row);
      } catch (const std::exception& error) {
        finish(request.id, common::FinishReason::kFailed, error.what());
      }
    }
    row += request.num_rows();
  }
  return step.tokens();
}

void Server::deliver(const InFlightStep& step, const ScheduledRequest& request, int row) {
  if (state(request.id).stop.has_value() || request.num_rows() == 0) {
    return;
  }
  if (step.is_greedy()) {
    request.sampling->resolve_placeholder(step.tokens()[static_cast<std::size_t>(row)]);
  } else {
    const auto first = step.logits().begin() + row;
    request.group->take({first, first + request.num_rows()});
  }
  hand_out_tokens(request.id);
}

void Server::hand_out_tokens(int id) {
  RequestState& served = state(id);
  if (served.sampling == nullptr) {  // a search knows its best text only at the end
    return;
  }
  std::vector<common::Completion>& seen = served.output.completions;
  const std::vector<common::Completion>& written = served.sampling->completions();
  seen.resize(written.size());
  for (std::size_t sample = 0; sample < written.size(); ++sample) {
    const bool has_token = written[sample].tokens.size() > seen[sample].tokens.size();
    seen[sample].finish_reason = written[sample].finish_reason;
    if (has_token) {
      seen[sample].tokens.push_back(written[sample].tokens.back());
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
  report_.ended.push_back(id);
  if (ended.group != nullptr) {
    scheduler_.remove(*ended.group);
    ids_.erase(ended.group.get());
    ended.group.reset();
  }
}

void Server::report_schedule(const ScheduledStep& step) {
  report_.token_budget = options_.token_budget;
  report_.num_tokens = step.num_tokens;
  for (const ScheduledGroup& scheduled : step.groups) {
    const std::vector<int>& counts = scheduled.tokens.num_tokens;
    report_.num_queries.insert(report_.num_queries.end(), counts.begin(), counts.end());
    report_.served.push_back(id_of(scheduled.group));
    report_.num_served.push_back(std::accumulate(counts.begin(), counts.end(), 0));
  }
  for (const SequenceGroup* group : step.admitted) {
    RequestState& admitted = state(id_of(group));
    report_.admitted.push_back(id_of(group));
    if (admitted.output.admission < 0.0) {
      admitted.output.admission = report_.begin;
    }
  }
  for (const auto& [group, swapped] : step.preempted) {
    (swapped ? report_.swapped_out : report_.recomputed).push_back(id_of(group));
    state(id_of(group)).output.preemptions += 1;
  }
}

}  // namespace
