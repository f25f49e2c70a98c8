// Serves requests as they come: each step the scheduler picks the tokens, one forward pass computes them all, and every
// request goes on from its own logits. A request ends by itself, is cancelled, or fails alone: the others go on.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/model/generation.h"
#include "decoding.h"
#include "engine.h"
#include "scheduler.h"
#include "serve/clock.h"

namespace stage8 {

// What is asked for: one text; several, drawn from one prompt; or the likeliest ones.
struct Task {
  common::Request request;
  int num_samples = 1;
  std::optional<BeamOptions> beam = std::nullopt;
};

// What became of it, and when, in seconds of the server's clock.
struct Outcome {
  std::vector<common::Completion> completions;  // one a sample; of a beam search, its hypotheses, the best first
  common::FinishReason finish_reason = common::FinishReason::kRejected;
  std::string error;
  bool finished = false;
  double arrival = 0.0;
  double admission = -1.0;          // the first one; negative: never
  std::vector<double> token_times;  // of the first sample's tokens
  double end = 0.0;
  int preemptions = 0;
};

// One step as it happened.
struct StepReport {
  std::int64_t index = 0;
  double begin = 0.0;
  double end = 0.0;
  double scheduling_seconds = 0.0;  // on the machine's own clock
  double computing_seconds = 0.0;   // likewise
  double waiting_seconds = 0.0;     // of these: for the GPU
  int token_budget = 0;
  int num_tokens = 0;
  std::int64_t num_read = 0;    // tokens whose K and V the attention has read
  int padded_tokens = 0;        // what it would be if all were as long as the longest
  std::vector<int> served;      // the requests in the batch, in order of arrival
  std::vector<int> num_served;  // how many tokens each
  std::vector<int> admitted;
  std::vector<int> swapped_out;  // of those that gave way
  std::vector<int> thrown_out;   // the others of those: they are computed again
  std::vector<int> ended;
  int num_running = 0;
  int num_waiting = 0;
  Usage usage;  // right after the forward pass: the fullest that the cache gets
};

// A token of a request's sample. May call submit() and stop(); if it throws, that request fails, and no other.
using OnSampleToken = std::function<void(int id, int sample, common::Token token)>;

class Server {
 public:
  // Engine and clock must outlive the server. Throws InputError if the engine has host blocks that a GPU can't reach.
  Server(Engine& engine, const SchedulerOptions& options, Clock& clock);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  void on_token(OnSampleToken callback) { on_token_ = std::move(callback); }
  // For whoever wants to watch, or to disturb: before each forward pass, and before each layer's attention on the CPU.
  void on_pass(std::function<void(const RaggedBatch&)> callback) { on_pass_ = std::move(callback); }
  void on_layer(std::function<void(int layer)> callback) { on_layer_ = std::move(callback); }
  void on_step(std::function<void(const StepReport&)> callback) { on_step_ = std::move(callback); }

  // Puts the task at the end of the queue and returns its id, counted from 0. What can never be served has ended then.
  int submit(const Task& task) { return submit(task, clock_.now()); }
  int submit(const Task& task, double arrival);

  // Ends a request, whatever it is at; what it has written stays. Not an error if it has ended.
  void stop(int id, common::FinishReason reason);

  // One step. False if there was nothing to do.
  bool step();
  bool is_idle() const { return scheduler_.running().empty() && scheduler_.waiting().empty() && !flight_; }

  // All the requests, one text each, from the beginning to the end.
  std::vector<common::Completion> run(std::span<const common::Request> requests, const common::OnToken& on_token);

  const Outcome& outcome(int id) const { return entry(id).outcome; }
  int num_requests() const { return static_cast<int>(entries_.size()); }
  int id_of(const Group* group) const { return ids_.at(group); }  // that has not ended
  const Scheduler& scheduler() const { return scheduler_; }
  Engine& engine() const { return engine_; }
  // Prompts and replies share steps: a step's time is divided among its tokens.
  common::Timing timing() const { return timing_; }
  // The engine's counters, and those of the steps.
  std::vector<common::Counter> counters() const;

 private:
  struct Entry {
    std::unique_ptr<BranchGroup> group;    // until it ends
    ParallelSampling* sampling = nullptr;  // the group, if it is one
    BeamSearch* search = nullptr;          // likewise
    Outcome outcome;
    std::optional<common::FinishReason> stop;  // wished for while a step was on
  };

  // A forward pass that has been ordered, and may not be over.
  struct Flight {
    std::vector<Share> shares;
    std::vector<int> ids;  // by share; the group may have ended since
    RaggedBatch batch;
    bool is_ordered = false;
    // What it finds, by row of wanted logits. If nobody needs the logits, the likeliest tokens are enough; a GPU has
    // them until they are asked for.
    bool is_greedy = false;
    std::vector<common::Matrix> logits;
    std::vector<common::Token> tokens;
  };

  std::string rejection(const Task& task) const;
  void compute(std::vector<Share> shares);
  void forward(Flight& flight);
  std::vector<common::Token> land(int step_age);
  void deliver(const Flight& flight, std::size_t share, int row);
  void hand_out_tokens(int id);
  void finish(int id, common::FinishReason reason, const std::string& error = "");
  void report_plan(const Step& step);
  void add_up();

  Entry& entry(int id) { return entries_.at(static_cast<std::size_t>(id)); }
  const Entry& entry(int id) const { return entries_.at(static_cast<std::size_t>(id)); }

  Engine& engine_;
  Clock& clock_;
  SchedulerOptions options_;
  std::deque<Entry> entries_;                  // by id
  std::unordered_map<const Group*, int> ids_;  // of those that have not ended
  Scheduler scheduler_;
  OnSampleToken on_token_;
  std::function<void(const RaggedBatch&)> on_pass_;
  std::function<void(int layer)> on_layer_;
  std::function<void(const StepReport&)> on_step_;
  SequenceId next_sequence_ = 0;
  std::optional<Flight> flight_;  // of the step before, if its tokens have not been taken
  bool in_step_ = false;
  std::vector<int> to_stop_;  // wished for while a step was on
  std::vector<int> landed_;   // who has got what this step waited for
  StepReport report_;         // of the step that is on, or was last
  // Sums over the steps.
  struct Totals {
    std::int64_t steps = 0;
    std::int64_t tokens = 0;
    std::int64_t padded_tokens = 0;
    std::int64_t slots_reserved = 0;
    std::int64_t slots_used = 0;
    std::int64_t running = 0;
    std::int64_t swapped_out = 0;
    std::int64_t thrown_out = 0;
    int most_running = 0;
  };
  Totals totals_;
  common::Timing timing_;
};

}  // namespace
