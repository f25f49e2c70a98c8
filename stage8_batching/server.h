// Serves requests as they arrive: each step the scheduler picks the tokens, one forward pass computes them all, and
// every request goes on from its own logits. A request finishes, is cancelled, or fails alone: the others go on.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "async_step.h"
#include "common/model/generation.h"
#include "decoding.h"
#include "engine.h"
#include "scheduler.h"
#include "serve/clock.h"
#include "step_report.h"

namespace stage8 {

// What is asked for: one text; several, drawn from one prompt; or the most probable ones.
struct GenerationRequest {
  common::Request request;
  int num_samples = 1;
  std::optional<BeamOptions> beam = std::nullopt;
};

// What became of it, and when, in seconds of the server's clock.
struct RequestOutput {
  std::vector<common::Completion> completions;  // one a sample; of a beam search, its hypotheses, the best first
  std::vector<Hypothesis> hypotheses;           // of a beam search
  common::FinishReason finish_reason = common::FinishReason::kRejected;
  std::string error;
  bool finished = false;
  double arrival = 0.0;
  double admission = -1.0;          // the first one; negative: never
  std::vector<double> token_times;  // of the first sample's tokens
  double end = 0.0;
  int preemptions = 0;
};

// A token of a request's sample. May call submit() and stop(); if it throws, that request fails, and no other.
using OnSampleToken = std::function<void(int id, int sample, common::Token token)>;

class Server {
 public:
  // Engine and clock must outlive the server.
  Server(Engine& engine, const SchedulerOptions& options, Clock& clock);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  void on_token(OnSampleToken callback) { on_token_ = std::move(callback); }
  // Before each forward pass, and before each layer's attention on the CPU. If they throw, the pass has failed.
  void on_pass(std::function<void(const RaggedBatch&)> callback) { on_pass_ = std::move(callback); }
  void on_layer(std::function<void(int layer)> callback) { on_layer_ = std::move(callback); }
  void on_step(std::function<void(const StepReport&)> callback) { on_step_ = std::move(callback); }

  // Puts the request at the end of the queue and returns its id, counted from 0. One that can never be served has ended
  // when this returns.
  int submit(const GenerationRequest& request) { return submit(request, clock_.now()); }
  int submit(const GenerationRequest& request, double arrival);
  // The id of a request that is refused for a reason of the caller's.
  int reject(const std::string& reason, double arrival);

  // Ends a request in whatever state it is; its text so far stays. Not an error if it has ended.
  void stop(int id, common::FinishReason reason);

  // One step. False if there was nothing to do. A CheckError if nothing can be computed because sequences that are not
  // the server's hold the cache; the call can be made again once they have freed blocks.
  bool step();
  bool is_idle() const { return scheduler_.running().empty() && scheduler_.waiting().empty() && !in_flight_; }

  // All the requests, one text each, from the beginning to the end.
  std::vector<common::Completion> run(std::span<const common::Request> requests, const common::OnToken& on_token);

  const RequestOutput& output(int id) const { return state(id).output; }
  int num_requests() const { return static_cast<int>(states_.size()); }
  int id_of(const SequenceGroup* group) const { return ids_.at(group); }  // that has not ended
  const Scheduler& scheduler() const { return scheduler_; }
  Engine& engine() const { return engine_; }
  common::Timing timing() const { return totals_.timing; }
  // The engine's counters, and those of the steps.
  std::vector<common::Counter> counters() const { return counters_of(engine_, totals_); }

 private:
  struct RequestState {
    std::unique_ptr<SequenceGroup> group;  // until it ends
    ParallelSampling* sampling = nullptr;  // the group, if it is one
    BeamSearch* search = nullptr;          // likewise
    RequestOutput output;
    std::optional<common::FinishReason> stop;  // asked for during a step
  };

  std::string rejection(const GenerationRequest& request) const;
  void compute(std::vector<ScheduledGroup> groups);
  std::vector<common::Token> collect(int step_age);
  void deliver(const InFlightStep& step, const ScheduledRequest& request, int row);
  void hand_out_tokens(int id);
  void finish(int id, common::FinishReason reason, const std::string& error = "");
  void report_schedule(const ScheduledStep& step);
  bool goes_on(int id) const { return !state(id).output.finished && !state(id).group->finished(); }

  RequestState& state(int id) { return states_.at(static_cast<std::size_t>(id)); }
  const RequestState& state(int id) const { return states_.at(static_cast<std::size_t>(id)); }

  Engine& engine_;
  Clock& clock_;
  SchedulerOptions options_;
  std::deque<RequestState> states_;                    // by id
  std::unordered_map<const SequenceGroup*, int> ids_;  // of those that have not ended
  Scheduler scheduler_;
  OnSampleToken on_token_;
  std::function<void(const RaggedBatch&)> on_pass_;
  std::function<void(int layer)> on_layer_;
  std::function<void(const StepReport&)> on_step_;
  std::optional<InFlightStep> in_flight_;  // the step before, if its tokens have not been collected
  bool in_step_ = false;
  std::vector<int> to_stop_;    // asked for during a step
  std::vector<int> collected_;  // the requests that have got in this step what they go on from
  StepReport report_;           // of the step that is on, or was last
  StepTotals totals_;
};

}  // namespace
