// Turns requests into text: in each step the scheduler picks the tokens, one forward pass computes them all, and every
// request continues from its own results.
//
// A request that finishes, is stopped or fails ends at once, also in the middle of a step: it leaves the scheduler, and
// its blocks are free. Engine and steps in flight share the request: a step finds it even if it has been forgotten
// meanwhile, and skips it if it has ended. What may throw, memory that runs out included:
//   - the request's sink, or the choice of its next token: only that request fails. A sink gets the tokens of the
//     output in order; it may lack the last one of each text if the request fails.
//   - what prepares a step's pass (step.h) or computes it. The request at fault is not known: each request of the step
//     gets a pass of its own, once, and fails if that one throws too. No request is affected by another one's pass.
//   - the wait for a step in flight. A device's error is permanent, so a second try is useless: its requests fail, and
//     nothing of what it computed is found by others.
//   - anything else, such as a scheduler that finds nothing to compute, or the callback of on_step(): step() throws. No
//     request has failed, and no slot stays reserved for what was not computed. step() can be called again.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "common/serving/generation_request.h"
#include "decoding.h"
#include "engine_options.h"
#include "kv_cache_manager.h"
#include "runner.h"
#include "scheduler.h"
#include "step.h"
#include "step_reporter.h"

namespace stage8 {

using common::Clock;
using common::GenerationRequest;
using common::VirtualClock;

class Engine {
 public:
  // The model must outlive the engine.
  Engine(const common::Llama& model, const EngineOptions& options);
  // The same with the caller's runner, with a clock, which must outlive the engine, and with a scheduler of another
  // kind.
  Engine(const common::Llama& model, const EngineOptions& options, std::unique_ptr<Runner> runner,
         Clock& clock = common::real_clock(), const MakeScheduler& make_scheduler = nullptr);
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Called before each forward pass. If it throws, the pass has failed.
  void on_pass(std::function<void(const RaggedBatch&)> callback) { on_pass_ = std::move(callback); }
  void on_step(std::function<void(const StepReport&)> callback) { reporter_.on_step(std::move(callback)); }

  // Serves these requests, one text each, to their end, and forgets them. on_token is called with the request's index.
  // If a step throws, they are cancelled.
  std::vector<common::Completion> run(std::span<const common::Request> requests, const common::OnToken& on_token);

  // Puts the request at the end of the queue and returns its id, counted from 0. A request that can never be served is
  // rejected: it has ended when this returns. sink: receives its tokens. arrival: absent means now. If it throws, there
  // is no such request.
  int submit(const GenerationRequest& request, TokenSink sink = nullptr, std::optional<double> arrival = std::nullopt);

  // Records a request that the caller rejects, with the reason, and returns its id.
  int reject(const std::string& reason, double arrival);

  // Ends a request in whatever state it is, and keeps its text so far. Does nothing if it has ended already.
  void stop(int id, common::FinishReason reason);

  // Runs one step. Returns false if there was nothing to do. CheckError if the scheduler has found nothing to compute,
  // because sequences of other callers hold the cache; the call can be repeated once they have freed blocks.
  bool step();
  bool is_idle() const { return scheduler_->running().empty() && scheduler_->waiting().empty() && !in_flight_; }

  const RequestOutput& output(int id) const { return find(id).output(); }
  // Drops a request that has ended, so that an engine can run for ever: it must not be asked for again.
  void forget(int id);
  int num_requests() const { return num_dropped_ + static_cast<int>(requests_.size()); }

  // Carries out the planned copies, then computes the tokens of the batch in one pass. Their slots must be reserved. A
  // GPU may still compute when this returns.
  StepId forward(const RaggedBatch& batch);

  // Why the request can never be served; empty if it can.
  std::string rejection(const GenerationRequest& generation) const;

  const common::Llama& model() const { return model_; }
  const EngineOptions& options() const { return options_; }  // with num_slots filled in
  // Max tokens of a prompt and its reply together.
  int context_length() const;
  KvCacheManager& manager() { return manager_; }
  const Scheduler& scheduler() const { return *scheduler_; }
  const CacheSize& cache() const { return runner_->cache(); }
  Runner& runner() { return *runner_; }

  // Counts of events so far, the same on every machine.
  std::vector<common::Counter> counters() const;
  std::int64_t blocks_copied() const { return blocks_copied_; }
  common::Timing timing() const { return reporter_.totals().timing; }

 protected:
  // All of a step that may throw: builds its batch, and enqueues it.
  virtual Step prepare(std::vector<ScheduledGroup> groups);
  // Whether the next step is scheduled before the tokens of this one are known.
  bool may_run_ahead(const Step& step) const;
  // Gives a group the results of a step: its rows begin at `row`.
  virtual void extend(const Step& step, const ScheduledGroup& scheduled, int row);

  const common::Llama& model_;
  EngineOptions options_;
  std::unique_ptr<Runner> runner_;
  KvCacheManager manager_;
  SequenceIds sequence_ids_;
  Clock& clock_;
  std::unique_ptr<Scheduler> scheduler_;
  StepReporter reporter_;

 private:
  // One forward pass for all groups. If it throws, one for each group that has not finished, and a group whose own pass
  // throws too ends with kFailed and the error.
  void compute(const std::vector<ScheduledGroup>& groups);
  // Computes the groups' tokens in one pass. Its results are collected at once, or by the next call if the step runs
  // ahead; collects the step before in any case. Returns the error if the pass has thrown: then no step is in flight,
  // and the groups can be computed again.
  std::optional<std::string> try_compute(std::vector<ScheduledGroup> groups);
  // Waits for the step in flight, if there is one, and gives its requests their results: those that have finished
  // meanwhile are passed over, and what throws ends its own request. Returns the tokens by row, if the step draws any.
  // If the wait throws, all its requests fail.
  std::vector<common::Token> collect();
  // When the requests of the step were first admitted, and what they found then.
  void note_admissions(const ScheduledStep& step);
  // Makes room to tell the ends of all requests that have not ended, and of one more.
  void expect_end();
  // Needs no memory: what fails for want of it must end.
  void end(SequenceGroup& group, common::FinishReason reason, std::string error = "");
  // CheckError if there is no such request, or if it has been forgotten.
  SequenceGroup& find(int id) const;

  std::deque<std::shared_ptr<SequenceGroup>> requests_;  // by id, from num_dropped_ on; null: forgotten
  int num_dropped_ = 0;                                  // forgotten requests at the beginning, no longer stored
  std::function<void(const RaggedBatch&)> on_pass_;
  std::optional<Step> in_flight_;  // the previous step, until its results are collected
  std::int64_t forward_passes_ = 0;
  std::int64_t blocks_copied_ = 0;
};

}  // namespace
