// GpuRunner by CUDA: pages, the model's weights, and the kernels of kernels.h in order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../gpu_runner.h"
#include "common/cuda/several/communicator.h"

namespace stage8 {

class CudaRunner : public GpuRunner {
 public:
  // Why the kernels do not take this model and cache; empty if they do.
  static std::string unsupported(const common::LlamaConfig& config, const KvCacheShape& shape,
                                 const GpuOptions& options);

  // Takes the device's memory for weights and K/V. chunk_size: the largest number of tokens in one forward pass.
  // Throws InputError if the memory is too small. max_sequences: the largest number of sequences, likewise. size: how
  // many blocks there are, if the shape does not say it. peers: of a model that several GPUs compute together, this
  // one's shard; the shape has its heads alone, and so have keys(), values() and logits().
  CudaRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
             int max_sequences, const GpuCacheSize& size = {}, common::Communicator* peers = nullptr);
  ~CudaRunner() override;

  void copy_blocks(std::span<const BlockCopy> copies) override;
  void forward(const RaggedBatch& step) override;
  common::Matrix logits() override;
  std::vector<common::Token> drawn_tokens(int step_age) override;
  void warm_up(int max_tokens, int max_sequences) override;
  int num_recorded_steps() const override;
  common::Matrix keys(int layer, std::span<const int> slots) override;
  common::Matrix values(int layer, std::span<const int> slots) override;
  int num_blocks() const override;
  std::int64_t weight_bytes_per_token() const override;
  double read_bandwidth() override;

  // With peers, of which one has failed, in this order. The step before the failed one ends, which all have enqueued
  // whole; has_step: the failed one has been enqueued here.
  void take_back(bool has_step);
  bool is_idle() const;  // whether nothing that is enqueued waits for another GPU
  void disconnect();     // ends what does
  void connect();        // once that is done for all, and before the next step of any

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace
