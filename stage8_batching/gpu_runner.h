// Steps computed by a GPU: pages, the model's weights, and a table of kernels. This header is free of CUDA;
// kernels/gpu_runner.cpp implements it, in builds with CUDA.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/cuda/several/communicator.h"
#include "engine_options.h"
#include "kv_cache.h"
#include "runner.h"

namespace common {
class Stream;
}

namespace stage8 {

class PagedKernels;  // kernels/kernels.h

class GpuRunner : public Runner {
 public:
  // Why this model and cache can't be computed with these kernels; empty if they can.
  static std::string unsupported(const PagedKernels& kernels, const common::LlamaConfig& config,
                                 const KvCacheShape& shape, const GpuOptions& options);

  // Takes the device's memory for weights and K/V. chunk_size: the largest number of tokens in one forward pass.
  // Throws InputError if the memory is too small, or the host's for the blocks that are swapped out. max_sequences: the
  // largest number of sequences, likewise. share: how many blocks there are, in place of the shape's number. peers: of
  // a model that several GPUs compute together, this one's shard; the shape has its heads alone, and so have cache(),
  // keys(), values() and logits(). The kernels must outlive the runner.
  GpuRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
            int max_sequences, const PagedKernels& kernels, const std::optional<MemoryShare>& share = {},
            common::Communicator* peers = nullptr);
  ~GpuRunner() override;

  const CacheSize& cache() const override;
  void copy_blocks(std::span<const BlockCopy> copies) override;
  void enqueue(const RaggedBatch& batch) override;
  StepResult wait(int step_age) override;
  bool is_asynchronous() const override { return true; }
  void warm_up(int max_tokens, int max_sequences) override;
  std::optional<ReadLimit> read_limit() override;

  // The parts of wait(): whether that step's batch asked for tokens; all logits of the last step; the tokens of one of
  // the last two.
  bool draws_tokens(int step_age) const;
  common::Matrix logits();
  std::vector<common::Token> drawn_tokens(int step_age);

  // With peers, of which one has failed, in this order. The step before the failed one ends, which all have enqueued
  // whole; has_step: the failed one has been enqueued here.
  void take_back(bool has_step);
  bool is_idle() const;       // whether nothing that is enqueued waits for another GPU
  virtual void disconnect();  // ends what does
  void connect();             // once that is done for all, and before the next step of any

  // For tests: K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  common::Matrix keys(int layer, std::span<const int> slots);
  common::Matrix values(int layer, std::span<const int> slots);

 protected:
  // What a step's launches depend on; all else is read on the device.
  struct StepCounts {
    int buffers = 0;        // which of the two steps that can be enqueued at once
    int num_tokens = 0;     // inactive sequences' included
    int num_sequences = 0;  // likewise
    int num_decodes = 0;    // sequences with one token before the first longer one, likewise
    int num_rows = 0;       // whose logits are computed, likewise
  };
  // With how many sequences the step is computed: those beyond its own are inactive, and have a token each.
  virtual int padded_sequences(const RaggedBatch& step) const;
  // Launches the kernels of a step whose inputs are on their way: one pass over all tokens, and the largest logit of
  // each row.
  virtual void launch(const StepCounts& counts);
  const common::Stream& stream() const;
  int max_sequences() const;  // of a step, inactive ones included
  // Waits for what is enqueued, or ends it if it waits for a GPU that has failed. Twice does no harm.
  void finish() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace
