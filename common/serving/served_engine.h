// What a server has to know about an engine: a few calls, and their results. Nothing else in this folder depends on how
// requests are scheduled, where their K and V are, or which stage computes them.
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
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/serving/generation_request.h"
#include "common/serving/pool_snapshot.h"
#include "common/serving/step_report.h"

namespace common {

// Receives a request's tokens and its end. May call submit() and cancel().
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  // Not called for a beam search, which knows its texts only at the end. logprobs: null if the request has none.
  // If it throws, only that request fails.
  virtual void on_token(int id, int sample, Token token, const TokenLogprobs* logprobs) = 0;
  // The last call. It must not throw.
  virtual void on_end(int id, RequestResult result) = 0;
};

// Sizes that can be changed while a server runs: a new engine is then made.
struct PoolSizes {
  int num_slots = 0;
  int block_size = 0;
  int token_budget = 0;
  // Whether preempted requests move to the host's memory; absent: as the engine's options say.
  std::optional<bool> swaps = std::nullopt;

  friend bool operator==(const PoolSizes&, const PoolSizes&) = default;
};

// The properties with which an engine was made.
struct EngineDescription {
  PoolSizes sizes;
  int max_sequences = 0;    // in one step
  int num_host_blocks = 0;  // for sequences that are swapped out
  int context_length = 0;   // max tokens of a prompt and its reply together
  int max_drafts = 0;       // that a request may ask for, in each step
  int window = 0;           // how many tokens a query sees, if that is the same in all layers; 0: all
  bool reads_once = false;  // blocks that several sequences of a step begin with, however few
  // Whether one text may be longer than the cache.
  bool exceeds_cache = false;
};

// The current state, in numbers that take no time to collect.
struct EngineStatus {
  int num_running = 0;
  int num_waiting = 0;
  SlotUsage slots = {};
  int num_host_blocks_used = 0;
  // Since the engine was made.
  std::int64_t blocks_copied = 0;
  std::int64_t blocks_moved = 0;  // of these, between the pool and the host's memory
  PrefixFigures prefix;
  HostCacheFigures host_cache;
  WindowPoolFigures window_pool;
  std::optional<WindowPromptFigures> window_prompts;  // nothing where prompts need the blocks of their whole text
  SharedReadingFigures shared_reading;
};

class ServedEngine {
 public:
  virtual ~ServedEngine() = default;

  virtual EngineDescription description() const = 0;
  virtual EngineStatus status() const = 0;
  // Blocks, tables, texts. The spans in it are valid until the next call that changes something.
  virtual PoolSnapshot pool() const = 0;
  virtual Clock& clock() = 0;

  // Puts the request at the end of the queue and returns its id. A request that can never be served has ended when this
  // returns.
  virtual int submit(const GenerationRequest& request, double arrival, std::unique_ptr<RequestSink> sink) = 0;
  // Records a request that the caller rejects, with the reason, and returns its id.
  virtual int reject(const std::string& reason, double arrival, std::unique_ptr<RequestSink> sink) = 0;
  // Ends a request in any state, and keeps its text so far: at once or, while a step is computed, with that step. Does
  // nothing if the request has ended.
  virtual void cancel(int id, FinishReason reason) = 0;

  // Computes one step, then calls on_end for the requests that it has ended. False: there was nothing to do.
  virtual bool step() = 0;
  virtual bool is_idle() const = 0;
  virtual const StepReport& last_step() const = 0;

  // Counts of events so far, the same on every machine.
  virtual std::vector<Counter> counters() const = 0;
  // Measures the limit; nothing else may be computed meanwhile. Returns nothing if the memory is the host's.
  virtual std::optional<ReadLimit> measure_read_limit() = 0;
};

// What an engine has to serve.
struct EngineDemand {
  std::vector<GenerationRequest> requests = {};  // every request that will arrive; empty: any that the model can serve
  std::optional<PoolSizes> sizes = {};           // in place of the options' sizes
  bool virtual_clock = false;
  // Called with the arrays of each forward pass, as text.
  std::function<void(const std::string& batch)> on_pass = nullptr;
};

using MakeEngine = std::function<std::unique_ptr<ServedEngine>(const EngineDemand& demand)>;
// For a model, which outlives the engine.
using MakeEngineFor = std::function<std::unique_ptr<ServedEngine>(const Llama& model, const EngineDemand& demand)>;

}  // namespace common
