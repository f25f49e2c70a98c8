// Computes steps: holds a runner, which has the model and the cache, and the cache's manager. The scheduler decides
// which tokens a step has, and the server what happens with the results.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "batch.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "decoding.h"
#include "engine_options.h"
#include "kv_cache_manager.h"
#include "runner.h"

namespace stage8 {

class Engine {
 public:
  // The model must outlive the engine.
  Engine(const common::Llama& model, const EngineOptions& options);
  // The same with the caller's runner.
  Engine(const common::Llama& model, const EngineOptions& options, std::unique_ptr<Runner> runner);

  // Starts a sequence with room for these tokens; the first manager().length(sequence) of them are in the cache
  // already. Returns false and changes nothing if there is no room.
  bool start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt);

  // Computes the next tokens of a live sequence, chunk by chunk, and stores their K and V. Returns the logits after the
  // last one, [1, vocab_size]. Returns nothing and changes nothing if there are too few slots.
  std::optional<common::Matrix> append(SequenceId sequence, std::span<const common::Token> tokens);
  // The same; draws_tokens says whether the result is a token or the logits.
  std::optional<StepResult> compute(SequenceId sequence, std::span<const common::Token> tokens, bool draws_tokens);

  // Carries out the planned copies, then computes the tokens of the batch in one pass. Their slots must be reserved. A
  // GPU may still compute when this returns.
  StepId forward(const RaggedBatch& batch);
  // Commits the tokens of a batch that was computed: they count towards their sequences' lengths, and full blocks are
  // published.
  void commit(const RaggedBatch& batch);

  // Why the model can't serve the request; empty if it can.
  std::string rejection(const common::Request& request) const;

  const common::Llama& model() const { return model_; }
  const EngineOptions& options() const { return options_; }  // with num_slots filled in
  // Max tokens of a prompt and its reply together.
  int context_length() const;
  KvCacheManager& manager() { return manager_; }
  SequenceIds& sequence_ids() { return sequence_ids_; }  // for all users of the manager
  const CacheSize& cache() const { return runner_->cache(); }
  Runner& runner() { return *runner_; }

  // Counts of events so far, the same on every machine.
  std::vector<common::Counter> counters() const;
  std::int64_t blocks_copied() const { return blocks_copied_; }

 private:
  const common::Llama& model_;
  EngineOptions options_;
  std::unique_ptr<Runner> runner_;
  KvCacheManager manager_;
  SequenceIds sequence_ids_;
  std::int64_t forward_passes_ = 0;
  std::int64_t kv_bytes_read_ = 0;
  std::int64_t blocks_copied_ = 0;
};

}  // namespace
