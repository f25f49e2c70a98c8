// Serves requests as they arrive: in each step the scheduler picks the tokens, one forward pass computes them all, and
// every request goes on from its own logits. A request that finishes, is cancelled or fails does not affect the others.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "async_step.h"
#include "common/base/clock.h"
#include "common/model/generation.h"
#include "common/serving/step_report.h"
#include "decoding.h"
#include "engine.h"
#include "scheduler.h"

namespace stage8 {

using common::Clock;
using common::RealClock;
using common::StepReport;
using common::StepTotals;
using common::VirtualClock;

// A request for one text, for several texts drawn from one prompt, or for the most probable ones.
struct GenerationRequest {
  common::Request request;
  int num_samples = 1;
  std::optional<BeamOptions> beam = std::nullopt;
};

// What a request has produced so far. Times are in seconds of the server's clock.
struct RequestOutput {
  std::vector<common::Completion> completions;  // one per sample; of a beam search, its hypotheses, best first
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

// Called with every token of every sample. May call submit() and stop(). If it throws, that request fails, and no
// other.
using OnSampleToken = std::function<void(int id, int sample, common::Token token)>;

class Server {
 public:
  // Engine and clock must outlive the server. CheckError if a step can be larger than the engine's forward pass.
  Server(Engine& engine, const SchedulerOptions& options, Clock& clock);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Returns the callback before.
  OnSampleToken on_token(OnSampleToken callback) { return std::exchange(on_token_, std::move(callback)); }
  // Called before each forward pass. If it throws, the pass has failed.
  void on_pass(std::function<void(const RaggedBatch&)> callback) { on_pass_ = std::move(callback); }
  void on_step(std::function<void(const StepReport&)> callback) { on_step_ = std::move(callback); }

  // Puts the request at the end of the queue and returns its id, counted from 0. A request that can never be served is
  // rejected: it has ended when this returns.
  int submit(const GenerationRequest& request) { return submit(request, clock_.now()); }
  int submit(const GenerationRequest& request, double arrival);

  // Records a request that the caller rejects, with the reason, and returns its id.
  int reject(const std::string& reason, double arrival);

  // Ends a request in whatever state it is, and keeps its text so far. Does nothing if it has ended already.
  void stop(int id, common::FinishReason reason);

  // Runs one step. Returns false if there was nothing to do. CheckError if nothing can be computed because sequences of
  // other callers hold the cache; the call can be repeated once they have freed blocks.
  bool step();
  bool is_idle() const { return scheduler_.running().empty() && scheduler_.waiting().empty() && !in_flight_; }

  // Serves these requests, one text each, to their end. on_token is called with the request's index.
  std::vector<common::Completion> run(std::span<const common::Request> requests, const common::OnToken& on_token);

  const RequestOutput& output(int id) const { return state(id).output; }
  // Drops the output of a request that has ended, so that a server can run for ever: it must not be asked for again.
  void forget(int id);
  int num_requests() const { return num_dropped_ + static_cast<int>(states_.size()); }
  const Scheduler& scheduler() const { return scheduler_; }
  Engine& engine() const { return engine_; }
  common::Timing timing() const { return totals_.timing; }
  // Those of the steps, and the engine's.
  std::vector<common::Counter> counters() const;

 private:
  struct RequestState {
    std::unique_ptr<SequenceGroup> group;  // until it ends
    ParallelSampling* sampling = nullptr;  // the group, if it is one
    BeamSearch* search = nullptr;          // likewise
    RequestOutput output;
    std::optional<common::FinishReason> stop;  // by stop() during a step
    bool is_forgotten = false;
    bool lacks_tokens = false;  // the last step has computed a part of what the cache lacks
  };

  std::string rejection(const GenerationRequest& request) const;
  void compute(std::vector<ScheduledGroup> groups);
  std::vector<common::Token> collect(int step_age);
  void deliver(const InFlightStep& step, const ScheduledGroup& scheduled, int row);
  void hand_out_tokens(int id);
  void finish(int id, common::FinishReason reason, const std::string& error = "");
  void report_schedule(const ScheduledStep& step);
  bool has_ended(int id) const { return id < num_dropped_ || state(id).output.finished; }
  bool goes_on(int id) const { return !has_ended(id) && !state(id).group->finished(); }

  RequestState& state(int id) { return states_.at(static_cast<std::size_t>(id - num_dropped_)); }
  const RequestState& state(int id) const { return states_.at(static_cast<std::size_t>(id - num_dropped_)); }

  Engine& engine_;
  Clock& clock_;
  SchedulerOptions options_;
  std::deque<RequestState> states_;  // by id, from num_dropped_ on
  int num_dropped_ = 0;              // of forgotten requests, those before all others
  Scheduler scheduler_;
  OnSampleToken on_token_;
  std::function<void(const RaggedBatch&)> on_pass_;
  std::function<void(const StepReport&)> on_step_;
  std::optional<InFlightStep> in_flight_;  // the previous step, until its tokens are collected
  bool in_step_ = false;
  std::vector<int> to_stop_;    // by stop() during a step
  std::vector<int> collected_;  // the requests whose results were collected in this step
  std::vector<int> ended_;      // the requests that have ended and are in no report yet
  std::int64_t num_steps_ = 0;
  StepReport report_;  // of the current step, or of the last one
  StepTotals totals_;
};

// Sets the server's callback for as long as it lives, and then the one before again.
class ScopedOnToken {
 public:
  ScopedOnToken(Server& server, OnSampleToken callback)
      : server_(server), before_(server.on_token(std::move(callback))) {}
  ~ScopedOnToken() { server_.on_token(std::move(before_)); }
  ScopedOnToken(const ScopedOnToken&) = delete;
  ScopedOnToken& operator=(const ScopedOnToken&) = delete;

 private:
  Server& server_;
  OnSampleToken before_;
};

}  // namespace
