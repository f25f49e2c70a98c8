// Turns requests into text: admits them while the cache has room, computes their prompts, then a token each in turn.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/model/generation.h"
#include "common/model/llama.h"
#include "engine_options.h"
#include "kv_cache_manager.h"
#include "runner.h"

namespace stage7 {

class Engine {
 public:
  // The model must outlive the engine.
  Engine(const common::Llama& model, const EngineOptions& options);
  // The same with the caller's runner.
  Engine(const common::Llama& model, const EngineOptions& options, std::unique_ptr<Runner> runner);

  // Serves the requests in static batches, in order: as many as fit are admitted and run to their end, then the next.
  // No room to grow is reserved: when the blocks run out, the latest arrival is preempted and computed again later.
  // A request that can never be served is rejected with the reason; the others are served all the same.
  std::vector<common::Completion> run(std::span<const common::Request> requests, const common::OnToken& on_token);

  // Starts a sequence with room for these tokens; the first manager().length(sequence) of them are in the cache
  // already. Returns false and changes nothing if there is no room.
  bool start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt);

  // Computes the next tokens of a live sequence, chunk by chunk, and stores their K and V. Returns the logits after the
  // last one, [1, vocab_size]. Returns nothing and changes nothing if there are too few slots.
  std::optional<common::Matrix> append(SequenceId sequence, std::span<const common::Token> tokens);
  // The same, but draws the token that comes after the completion's, instead of returning the logits.
  std::optional<common::Token> next(SequenceId sequence, std::span<const common::Token> tokens,
                                    const common::Request& request, common::Completion& completion);

  // Why the request can never be served; empty if it can.
  std::string rejection(const common::Request& request) const;

  KvCacheManager& manager() { return manager_; }
  const CacheSize& cache() const { return runner_->cache(); }
  Runner& runner() { return *runner_; }

  // Counts of events so far, the same on every machine.
  std::vector<common::Counter> counters() const;
  common::Timing timing() const { return timing_; }

 private:
  // A request that is being served or waits.
  struct Generation {
    SequenceId sequence = 0;  // the request's index
    const common::Request* request = nullptr;
    common::Completion* completion = nullptr;
    std::vector<common::Token> tokens;  // the prompt and the tokens drawn so far; the cache may lack the last ones
    bool finished = false;
  };

  // Computes what the cache lacks, the whole prompt at first, and draws the next token. Returns false and changes
  // nothing if there are too few slots.
  bool step(Generation& generation, const common::OnToken& on_token);
  // Counts a round, in which each request of the batch got one token, and frees the slots of finished requests.
  void end_round(std::vector<Generation>& batch);
  // What append() and next() share; draws_tokens says whether the result is a token or the logits. Returns nothing if
  // there are too few slots.
  std::optional<StepResult> compute(SequenceId sequence, std::span<const common::Token> tokens, bool draws_tokens);
  // Enqueues a chunk, whose slots are reserved. From then on it counts towards the sequence's length.
  StepId forward(SequenceId sequence, std::span<const common::Token> chunk, bool is_last, bool draws_tokens);

  const common::Llama& model_;
  EngineOptions options_;
  std::unique_ptr<Runner> runner_;
  KvCacheManager manager_;
  common::Timing timing_;
  std::int64_t forward_passes_ = 0;
  std::int64_t kv_bytes_read_ = 0;
  std::int64_t preemptions_ = 0;
  std::int64_t blocks_copied_ = 0;
  // Summed over the rounds; a round gives every request of the batch one token.
  std::int64_t rounds_ = 0;
  std::int64_t slots_reserved_ = 0;
  std::int64_t slots_used_ = 0;
  std::int64_t requests_held_ = 0;
  int max_running_ = 0;
};

}  // namespace
