// Computes steps on a GPU: pages, the model's weights, and a table of kernels. This header needs no CUDA;
// kernels/gpu_runner.cpp implements it, in builds with CUDA.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/app/cache_room.h"
#include "common/cuda/several/communicator.h"
#include "engine_options.h"
#include "kv_cache.h"
#include "runner.h"

namespace common {
class CudaLlama;
class PagedKernels;  // common/paged/paged_kernels.h
class Stream;
}  // namespace common

namespace stage8 {

class StepBuffers;  // kernels/step_buffers.h
class StepSampler;  // kernels/step_sampler.h

using MakeSampler = std::function<std::unique_ptr<StepSampler>(int vocab_size, int max_rows)>;

class GpuRunner : public Runner {
 public:
  // Why this model and cache can't be computed with these kernels; empty if they can.
  static std::string unsupported(const common::PagedKernels& kernels, const common::LlamaConfig& config,
                                 const KvCacheShape& shape, const GpuOptions& options);

  // Allocates the device's memory for weights and K/V. chunk_size: the largest number of tokens in one forward pass.
  // Throws InputError if the memory is too small, or the host's memory for swapped blocks. max_sequences: the largest
  // number of sequences in one pass. share: the rule for the number of blocks, in place of the shape's number. peers:
  // the other GPUs, if this runner has one shard of the model (production/shard_runner.h); shape, cache(), keys(),
  // values() and logits then have this shard's part only. The kernels must outlive the runner. make_sampler: what draws
  // tokens, made before the cache takes its share; without it, the host draws. max_rows: of logits in one pass, if a
  // sequence may have several; else there are max_sequences at most.
  GpuRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
            int max_sequences, const common::PagedKernels& kernels,
            const std::optional<common::MemoryShare>& share = {}, common::Communicator* peers = nullptr,
            const MakeSampler& make_sampler = {}, int max_rows = 0);
  ~GpuRunner() override;

  const CacheSize& cache() const override;
  void copy_blocks(std::span<const BlockCopy> copies) override;
  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;
  bool is_asynchronous() const override { return true; }
  void warm_up(int max_tokens, int max_sequences) override;

  // For tests: the logits of the last step, even if it has drawn tokens from them.
  common::Matrix logits();
  // For tests: K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  common::Matrix keys(int layer, std::span<const int> slots);
  common::Matrix values(int layer, std::span<const int> slots);

 protected:
  // What a step's launches depend on; all else is read on the device.
  struct StepCounts {
    int buffers = 0;     // the index of the step's buffers: two steps can be enqueued at once
    int num_tokens = 0;  // here and below, inactive sequences are included
    int num_sequences = 0;
    int num_decodes = 0;  // sequences with one token before the first longer one
    int num_rows = 0;     // rows whose logits are computed
  };
  // The number of sequences with which the step is computed: the batch's, then inactive ones with one token each.
  virtual int padded_sequences(const RaggedBatch& step) const;
  // Launches the kernels of a step whose inputs are enqueued: one pass over all tokens, and each row's largest logit.
  virtual void launch(const StepCounts& counts);
  // Ends what has been enqueued of a step that can't be enqueued completely: it still reads the step's inputs.
  virtual void abandon(const StepBuffers& step) noexcept;
  const common::Stream& stream() const;
  int max_sequences() const;  // in a step, inactive ones included
  common::CudaLlama& model();
  StepId last() const;  // the last step that was enqueued
  // Of one of the last two steps, or of the next one, which has those of the step before the last.
  const StepBuffers& buffers(StepId step) const;
  // Passes over steps that this runner will not compute, so that later ones have the same ids on all GPUs.
  void skip_to(StepId last);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace
