// Steps computed by a GPU: pages, the model's weights, and the kernels of kernels.h in order. This header is free of
// CUDA; kernels/gpu_runner.cpp implements it, in builds with CUDA.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kv_cache.h"
#include "runner.h"

namespace stage7 {

class GpuRunner : public Runner {
 public:
  // Why the kernels do not take this model and cache; empty if they do.
  static std::string unsupported(const common::LlamaConfig& config, const KvCacheShape& shape,
                                 const GpuOptions& options);

  // Takes the device's memory for weights and K/V. chunk_size: the largest number of tokens in one forward pass.
  // Throws InputError if the memory is too small.
  GpuRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size);
  ~GpuRunner() override;

  const CacheSize& cache() const override;
  void copy_blocks(std::span<const BlockCopy> copies) override;
  void enqueue(const RaggedBatch& batch) override;
  StepResult wait() override;
  std::optional<ReadLimit> read_limit() override;

  // For tests: K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  common::Matrix keys(int layer, std::span<const int> slots);
  common::Matrix values(int layer, std::span<const int> slots);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace
