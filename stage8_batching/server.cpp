#include "server.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"

namespace stage8 {
Server::Server(Engine& engine, const SchedulerOptions& options, Clock& clock)
    : engine_(engine), clock_(clock), options_(options), scheduler_(engine.manager(), options) {}

int Server::submit(const Task& task, double arrival) {
  const int id = num_requests();
  Entry& added = entries_.emplace_back();
  added.outcome.arrival = arrival;
  if (const std::string reason = rejection(task); !reason.empty()) {
    finish(id, common::FinishReason::kRejected, reason);
    return id;
  }
  // A beam search takes a new id for every branch it has ever had.
  const int most_sequences = task.beam ? 1 + task.beam->width * task.request.max_new_tokens : task.num_samples;
  if (task.beam.has_value()) {
    auto search = std::make_unique<BeamSearch>(engine_, task.request, *task.beam, next_sequence_);
    added.search = search.get();
    added.group = std::move(search);
  } else {
    auto sampling = std::make_unique<ParallelSampling>(engine_, task.request, task.num_samples, next_sequence_);
    added.sampling = sampling.get();
    added.group = std::move(sampling);
  }
  next_sequence_ += most_sequences;
  ids_[added.group.get()] = id;
  scheduler_.add(*added.group);
  return id;
}

void Server::stop(int id, common::FinishReason reason) {
  if (entry(id).outcome.finished) {
    return;
  }
  if (in_step_) {
    entry(id).stop = reason;  // the step goes over it; what comes after is not written any more
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
  in_step_ = true;
  Step plan = scheduler_.schedule();
  report_plan(plan);
  report_.usage = engine_.manager().usage();
  report_.scheduling_seconds = common::now_seconds() - start;
  if (plan.shares.empty()) {
    COMMON_CHECK(flight_.has_value(), "somebody else holds the cache");
    land(0);
  } else {
    compute(std::move(plan.shares));
  }
  report_.computing_seconds = common::now_seconds() - start - report_.scheduling_seconds;
  in_step_ = false;

  report_.end = clock_.now();
  report_.num_running = static_cast<int>(scheduler_.running().size());
  for (const int id : std::exchange(to_stop_, {})) {
    if (!entry(id).outcome.finished) {
      finish(id, *entry(id).stop);
    }
  }
  for (const int id : std::exchange(landed_, {})) {
    const Entry& served = entry(id);
    if (!served.outcome.finished && served.group->finished()) {
      finish(id,
             served.sampling ? served.sampling->completions().front().finish_reason : common::FinishReason::kLength);
    }
  }
  report_.num_waiting = static_cast<int>(scheduler_.waiting().size());
  add_up();
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
    const Outcome& outcome = entry(id).outcome;
    completions.push_back(outcome.completions.empty() ? common::Completion{} : outcome.completions.front());
    completions.back().finish_reason = outcome.finish_reason;
    completions.back().error = outcome.error;
  }
  return completions;
}

std::string Server::rejection(const Task& task) const {
  if (std::string reason = engine_.rejection(task.request); !reason.empty()) {
    return reason;
  }
  const common::LlamaConfig& config = engine_.model().config();
  for (const common::Token token : task.request.prompt) {
    if (token < 0 || token >= config.vocab_size) {
      return common::format("token %d is not in the vocabulary", token);
    }
  }
  const int num_sequences = task.beam ? task.beam->width : task.num_samples;
  const int most = std::min(options_.token_budget, options_.max_sequences);
  if (num_sequences < 1 || num_sequences > most) {
    return common::format("%d sequences at once, and a step has room for 1 to %d", num_sequences, most);
  }
  // Alone, and with nothing shared but the full blocks of the prompt, it has to fit: then it can always be served when
  // everybody behind it has given way. The last token of a text never gets into the cache.
  const int block_size = engine_.manager().block_size();
  const auto prompt_length = static_cast<int>(task.request.prompt.size());
  const int length = prompt_length + task.request.max_new_tokens - 1;
  const int shared = prompt_length / block_size;
  const std::int64_t needed = shared + std::int64_t{num_sequences} * ((length + block_size - 1) / block_size - shared);
  if (const int total = engine_.manager().usage().total / block_size; needed > total) {
    return common::format("the request needs up to %lld blocks, and the whole cache has %d",
                          static_cast<long long>(needed), total);
  }
  return "";
}

void Server::hand_out_tokens(int id) {
  Entry& served = entry(id);
  if (served.sampling == nullptr) {  // which of a search's texts is the best is known at its end
    return;
  }
  std::vector<common::Completion>& seen = served.outcome.completions;
  const std::vector<common::Completion>& written = served.sampling->completions();
  seen.resize(written.size());
  for (std::size_t sample = 0; sample < written.size(); ++sample) {
    const bool has_token = written[sample].tokens.size() > seen[sample].tokens.size();
    seen[sample].finish_reason = written[sample].finish_reason;
    if (has_token) {
      seen[sample].tokens.push_back(written[sample].tokens.back());
    }
    if (has_token && sample == 0) {
      served.outcome.token_times.push_back(clock_.now());
    }
    if (has_token && on_token_) {
      on_token_(id, static_cast<int>(sample), written[sample].tokens.back());
    }
  }
}

void Server::finish(int id, common::FinishReason reason, const std::string& error) {
  Entry& ended = entry(id);
  Outcome& outcome = ended.outcome;
  if (ended.search != nullptr) {
    for (const Hypothesis& hypothesis : ended.search->hypotheses()) {
      outcome.completions.push_back({hypothesis.tokens, hypothesis.finish_reason, ""});
    }
  }
  outcome.finish_reason = reason;
  outcome.error = error;
  outcome.end = clock_.now();
  outcome.finished = true;
  report_.ended.push_back(id);
  if (ended.group != nullptr) {
    scheduler_.remove(*ended.group);
    ids_.erase(ended.group.get());
    ended.group.reset();
  }
}

}  // namespace
