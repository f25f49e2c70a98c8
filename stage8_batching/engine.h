// What computes a step: the model, the cache, its manager and, where there is one, a GPU. Which tokens a step has is
// the scheduler's decision, and what becomes of them the server's.
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
#include "gpu_runner.h"
#include "kv_cache.h"
#include "kv_cache_manager.h"
#include "sequence_ids.h"

namespace stage8 {

struct EngineOptions {
  // The cache's size, in tokens.
  int num_slots = 4096;
  // The most tokens in one forward pass: bounds the activations, however long the prompt.
  int chunk_size = 256;
  // Slots in a block. The cache is rounded up to whole blocks.
  int block_size = 16;
  SoftmaxMode softmax = SoftmaxMode::kOnline;
  // Whether sequences share what others, live or ended, have computed.
  bool prefix_cache = true;
  GpuOptions gpu = {};
  // Room in the processor's memory for what is swapped out of the cache, in tokens.
  int num_host_slots = 0;
};

class Engine {
 public:
  // The model must outlive the engine.
  Engine(const common::Llama& model, const EngineOptions& options);

  // Starts a sequence with room for these tokens, the first length(sequence) of which need not be computed. False if
  // there is no room; nothing has changed then.
  bool start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt, Admission admission = {});

  // Computes the next tokens of a live sequence, a chunk at a time, and keeps their K and V. Returns the logits that
  // follow the last one: [1, vocab_size]. Nothing if the slots run out; nothing has changed then.
  std::optional<common::Matrix> append(SequenceId sequence, std::span<const common::Token> tokens);
  // The same without the logits. False if the slots run out; nothing has changed then.
  bool compute(SequenceId sequence, std::span<const common::Token> tokens);

  // One pass over the tokens of the batch, of many sequences, for which slots are reserved. Planned copies are carried
  // out first. A GPU may not have finished when this returns.
  void forward(const RaggedBatch& batch);
  // The tokens of a batch that was computed, or enqueued on a GPU, count towards their sequences' lengths from here on,
  // and can be found in the prefix cache. Sequences that have ended since are left out.
  void commit(const RaggedBatch& batch);
  // What follows from the last forward pass, for the rows whose logits it wanted: [num_rows, vocab_size].
  common::Matrix logits() const { return gpu_ ? gpu_->logits() : model_.logits(hidden_); }

  // Why a request of these lengths can never be served; empty if it can.
  std::string rejection(std::int64_t prompt_length, int max_new_tokens) const;

  const common::Llama& model() const { return model_; }
  const EngineOptions& options() const { return options_; }
  SequenceIds& sequence_ids() { return sequence_ids_; }
  KvCacheManager& manager() { return manager_; }
  KvCache& cache() { return cache_; }
  GpuRunner* gpu() { return gpu_.get(); }  // null: all is done on the CPU

  // What happened so far, in numbers that are the same on every machine.
  std::vector<common::Counter> counters() const;

 private:
  const common::Llama& model_;
  EngineOptions options_;
  KvCache cache_;
  KvCacheManager manager_;
  SequenceIds sequence_ids_;
  std::unique_ptr<GpuRunner> gpu_;
  common::Matrix hidden_;  // what the CPU's last forward pass has left: [num_rows, hidden_size]
  std::int64_t forward_passes_ = 0;
  std::int64_t kv_bytes_read_ = 0;
  std::int64_t blocks_copied_ = 0;
};

}  // namespace
