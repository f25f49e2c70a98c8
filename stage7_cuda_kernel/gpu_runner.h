// Computes steps on a GPU: pages, the model's weights, and a table of kernels. This header needs no CUDA;
// kernels/gpu_runner.cpp implements it, in builds with CUDA.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "engine_options.h"
#include "kv_cache.h"
#include "runner.h"

namespace common {
class PagedKernels;  // common/paged/paged_kernels.h
}

namespace stage7 {

class GpuRunner : public Runner {
 public:
  // Why this model and cache can't be computed with these kernels; empty if they can.
  static std::string unsupported(const common::PagedKernels& kernels, const common::LlamaConfig& config,
                                 const KvCacheShape& shape, const GpuOptions& options);

  // Allocates the device's memory for weights and K/V. chunk_size: the largest number of tokens in one forward pass.
  // Throws InputError if the memory is too small. The kernels must outlive the runner.
  GpuRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
            const common::PagedKernels& kernels);
  ~GpuRunner() override;

  const CacheSize& cache() const override;
  void copy_blocks(std::span<const BlockCopy> copies) override;
  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;

  // For tests: K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  common::Matrix keys(int layer, std::span<const int> slots);
  common::Matrix values(int layer, std::span<const int> slots);

 private:
  // Launches the kernels of a step whose inputs are enqueued: one pass over all tokens, and each row's largest logit.
  // Steps with equal counts have the same launches; everything else is read on the device.
  void launch(int num_tokens, int num_rows);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace
