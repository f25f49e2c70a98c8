// Computes steps: holds the model, the cache, its manager and, if there is one, the GPU's runner. The scheduler decides
// which tokens a step has, and the server what becomes of the results.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "batch.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "decoding.h"
#include "gpu_runner.h"
#include "kv_cache.h"
#include "kv_cache_manager.h"

namespace stage8 {

struct EngineOptions {
  // The cache's size, in tokens. 0: what fits, see cache_size.h.
  int num_slots = 4096;
  // What fits: on a GPU this share of the memory that weights and workspaces leave free; on a CPU min_slots, if they
  // are not more than half of the free memory.
  double memory_fraction = 0.9;
  int min_slots = 4096;
  // Max tokens of a prompt and its reply together; 0: as many as the model can have.
  int context_length = 0;
  // Max tokens in one forward pass: bounds the memory of the activations, however long the prompt is.
  int chunk_size = 256;
  // Max sequences in one forward pass: bounds the memory of the logits.
  int max_sequences = 64;
  // Slots in a block. The cache is rounded up to whole blocks.
  int block_size = 16;
  SoftmaxMode softmax = SoftmaxMode::kOnline;
  // Whether sequences share blocks that others, live or ended, have computed.
  bool prefix_cache = true;
  GpuOptions gpu = {};
  // Room in the host's memory for what is swapped out of the cache, in tokens.
  int num_host_slots = 0;
};

class Engine {
 public:
  // The model must outlive the engine.
  Engine(const common::Llama& model, const EngineOptions& options);

  // Starts a sequence with room for these tokens, of which the first manager().length(sequence) are in the cache
  // already. Returns false and changes nothing if there is no room.
  bool start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt);

  // Computes the next tokens of a live sequence, chunk by chunk, and stores their K and V. Returns the logits after the
  // last one, [1, vocab_size]. Returns nothing and changes nothing if there are too few slots.
  std::optional<common::Matrix> append(SequenceId sequence, std::span<const common::Token> tokens);
  // The same without the logits. Returns false and changes nothing if there are too few slots.
  bool compute(SequenceId sequence, std::span<const common::Token> tokens);

  // For tests, on the CPU: called before the attention of each layer. If it throws, the forward pass has failed.
  void on_layer(std::function<void(int layer)> callback) { on_layer_ = std::move(callback); }

  // Carries out the planned copies, then computes the tokens of the batch, whose slots must be reserved, in one pass. A
  // GPU may not have finished when this returns.
  void forward(const RaggedBatch& batch);
  // Commits the tokens of a batch that was computed, or enqueued on a GPU: they count towards their sequences' lengths,
  // and full blocks are published. Sequences that have ended since are left out.
  void commit(const RaggedBatch& batch);
  // The logits that the last forward pass was asked for: [num_rows, vocab_size].
  common::Matrix logits() const { return gpu_ ? gpu_->logits() : model_.logits(hidden_); }

  // Why the model can't serve the request; empty if it can.
  std::string rejection(const common::Request& request) const;

  const common::Llama& model() const { return model_; }
  const EngineOptions& options() const { return options_; }
  // Max tokens of a prompt and its reply together.
  int context_length() const;
  KvCacheManager& manager() { return manager_; }
  SequenceIds& sequence_ids() { return sequence_ids_; }  // for all that use the manager
  KvCache& cache() { return cache_; }
  GpuRunner* gpu() { return gpu_.get(); }  // null: all is computed on the CPU

  // Counts of what has happened so far, the same on every machine.
  std::vector<common::Counter> counters() const;
  std::int64_t blocks_copied() const { return blocks_copied_; }

 private:
  const common::Llama& model_;
  EngineOptions options_;
  std::unique_ptr<GpuRunner> gpu_;
  KvCache cache_;  // on a GPU without floats
  KvCacheManager manager_;
  SequenceIds sequence_ids_;
  std::function<void(int layer)> on_layer_;
  common::Matrix hidden_;  // of the last batch's logits_rows, computed on the CPU: [num_rows, hidden_size]
  std::int64_t forward_passes_ = 0;
  std::int64_t kv_bytes_read_ = 0;
  std::int64_t blocks_copied_ = 0;
};

}  // namespace
