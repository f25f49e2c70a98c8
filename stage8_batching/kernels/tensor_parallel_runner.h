// A model that several GPUs compute together, each with its heads of every block: a runner that has runners. All of
// them get the same steps, so one block table serves them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../gpu_runner.h"
#include "common/cuda/several/nccl_group.h"
#include "cuda_runner.h"
#include "device_thread.h"

namespace stage8 {

class TensorParallelRunner : public GpuRunner {
 public:
  // Why so many GPUs can't compute this model with this cache; empty if they can.
  static std::string unsupported(const common::LlamaConfig& config, const KvCacheShape& shape,
                                 const GpuOptions& options);

  // As CudaRunner, but for the number of GPUs, whose shards are loaded at the same time. The GPU with the least memory
  // says how many blocks there are. Throws InputError also if the GPUs do not find each other.
  TensorParallelRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                       int max_sequences, const GpuCacheSize& size = {});
  ~TensorParallelRunner() override;
  TensorParallelRunner(const TensorParallelRunner&) = delete;
  TensorParallelRunner& operator=(const TensorParallelRunner&) = delete;

  void copy_blocks(std::span<const BlockCopy> copies) override;
  // If it throws on one GPU, it is taken back on all; the next step connects them anew.
  void forward(const RaggedBatch& step) override;
  common::Matrix logits() override;
  std::vector<common::Token> drawn_tokens(int step_age) override;
  void warm_up(int max_tokens, int max_sequences) override;
  int num_recorded_steps() const override;
  common::Matrix keys(int layer, std::span<const int> slots) override;
  common::Matrix values(int layer, std::span<const int> slots) override;
  int num_blocks() const override;
  std::int64_t weight_bytes_per_token() const override;  // of all GPUs together
  double read_bandwidth() override;                      // likewise

 private:
  using Task = std::function<void(std::size_t rank)>;
  // Runs the task in every GPU's thread. Returns what each has thrown, if anything.
  std::vector<std::exception_ptr> run(const Task& task);
  // The same; rethrows the first.
  void run_all(const Task& task);
  // For a task in which the GPUs wait for each other: if one fails, none is left waiting.
  void run_together(const Task& task);
  // Ends what waits on those GPUs that have not thrown, and all connections.
  void disconnect(const std::vector<std::exception_ptr>& thrown);
  // Of what each GPU has for its heads or its tokens, all, side by side.
  common::Matrix side_by_side(const std::function<common::Matrix(CudaRunner&)>& part);

  common::NcclGroup group_;
  std::vector<std::unique_ptr<DeviceThread>> threads_;
  std::vector<std::unique_ptr<CudaRunner>> runners_;
  bool is_connected_ = true;
};

}  // namespace
