// What a server has to know of an engine: a few calls, and what they say. Nothing else in this folder depends on how
// requests are scheduled, where their K and V are, or which stage does it.
//
//   clients ──► EngineThread, serve() ──► ServedEngine ◄── a stage's adapter ──► its scheduler, cache and model
//
// All calls are for one thread. Requests have ids, counted from 0 in the order in which they were submitted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "common/serving/pool_snapshot.h"
#include "common/serving/step_report.h"

namespace common {

// A request for one text, for several texts drawn from one prompt, or for the likeliest ones.
struct ServedRequest {
  Request request;
  int num_samples = 1;
  // Given: they are the hypotheses of a beam search as wide, compared by log-probability / length ^ length_penalty.
  std::optional<double> length_penalty = std::nullopt;
};

// What has become of a request that has ended. Times are in seconds of the engine's clock.
struct RequestResult {
  std::vector<Completion> completions;  // one for each sample; of a beam search, best first
  FinishReason finish_reason = FinishReason::kRejected;
  std::string error;
  int prompt_tokens = 0;
  double arrival = 0.0;
  double admission = -1.0;          // when it was first admitted; negative: never
  std::vector<double> token_times;  // when the first sample's tokens arrived
  double end = 0.0;
};

// Where a request's tokens and its end go. May call submit() and cancel().
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  // A beam search knows its texts only at the end, and calls this for none. logprobs: null unless the request wants
  // them. If it throws, the request fails, and no other.
  virtual void on_token(int id, int sample, Token token, const TokenLogprobs* logprobs) = 0;
  // The last call. It must not throw.
  virtual void on_end(int id, RequestResult result) = 0;
};

// What can be chosen anew while a server runs: the engine is then made again.
struct PoolSizes {
  int num_slots = 0;
  int block_size = 0;
  int token_budget = 0;
};

// An engine as it was made.
struct EngineDescription {
  PoolSizes sizes;
  int max_sequences = 0;    // in one step
  int num_host_blocks = 0;  // for what is swapped out
  int context_length = 0;   // max tokens of a prompt and its reply together
};

// What bounds the speed of decoding: each step reads all weights, and K and V of the tokens before.
struct ReadLimit {
  std::int64_t weight_bytes = 0;
  std::int64_t bytes_per_slot = 0;
  double bytes_per_second = 0.0;  // that the memory gives
};

// The state of the moment, in numbers that cost nothing.
struct EngineStatus {
  int num_running = 0;
  int num_waiting = 0;
  SlotUsage slots = {};
  int num_host_blocks_used = 0;
  std::int64_t blocks_copied = 0;  // since the engine was made
  PrefixFigures prefix;            // likewise
};

class ServedEngine {
 public:
  virtual ~ServedEngine() = default;

  virtual EngineDescription description() const = 0;
  virtual EngineStatus status() const = 0;
  // Blocks, tables, texts. The spans in it are valid until the next call that changes something.
  virtual PoolSnapshot pool() const = 0;
  virtual Clock& clock() = 0;

  // Puts the request at the end of the queue and returns its id. One that can never be served has ended when this
  // returns.
  virtual int submit(const ServedRequest& request, double arrival, std::unique_ptr<RequestSink> sink) = 0;
  // Records a request that the caller rejects, with the reason, and returns its id.
  virtual int reject(const std::string& reason, double arrival, std::unique_ptr<RequestSink> sink) = 0;
  // Ends a request in whatever state it is, and keeps its text so far: at once or, if a step is being computed, with
  // it. Does nothing if the request has ended.
  virtual void cancel(int id, FinishReason reason) = 0;

  // Computes one step, and then tells the requests that it has ended. False: there was nothing to do.
  virtual bool step() = 0;
  virtual bool is_idle() const = 0;
  virtual const StepReport& last_step() const = 0;

  // Counts of events so far, the same on every machine.
  virtual std::vector<Counter> counters() const = 0;
  // Measures it, so that nothing else may be computed. Nothing where the memory is the host's.
  virtual std::optional<ReadLimit> measure_read_limit() = 0;
};

// What an engine is made for.
struct EngineDemand {
  std::vector<ServedRequest> requests = {};  // all that will come; none: any that the model can take
  std::optional<PoolSizes> sizes = {};       // in place of the options'
  bool virtual_clock = false;
  // Is called with the arrays of each forward pass, as text.
  std::function<void(const std::string& batch)> on_pass = nullptr;
};

using MakeEngine = std::function<std::unique_ptr<ServedEngine>(const EngineDemand& demand)>;
// For a model, which outlives the engine.
using MakeEngineFor = std::function<std::unique_ptr<ServedEngine>(const Llama& model, const EngineDemand& demand)>;

}  // namespace common
