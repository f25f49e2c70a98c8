// GpuRunner by CUDA: pages, the model's weights, and the kernels of kernels.h in order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "../gpu_runner.h"

namespace stage7 {

class CudaRunner : public GpuRunner {
 public:
  // Why the kernels do not take this model and cache; empty if they do.
  static std::string unsupported(const common::LlamaConfig& config, const KvCacheShape& shape,
                                 const GpuOptions& options);

  // Takes the device's memory for weights and K/V. chunk_size: the largest number of tokens in one forward pass.
  // Throws InputError if the memory is too small.
  CudaRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size);
  ~CudaRunner() override;

  void copy_blocks(std::span<const BlockCopy> copies) override;
  void forward(const GpuStep& step) override;
  common::Matrix logits() override;
  common::Token argmax_token() override;
  common::Matrix keys(int layer, std::span<const int> slots) override;
  common::Matrix values(int layer, std::span<const int> slots) override;
  std::int64_t weight_bytes_per_token() const override;
  double read_bandwidth() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace
