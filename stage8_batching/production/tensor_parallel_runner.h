// Several GPUs compute a model together, each with its heads of every block: a runner that has runners. All of them get
// the same steps, so one block table serves all GPUs.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/cuda/several/nccl_group.h"
#include "device_thread.h"
#include "host_cache/host_blocks.h"
#include "shard_runner.h"

namespace stage8 {

class TensorParallelRunner : public Runner, public HostBlocks {
 public:
  // Why this number of GPUs can't compute this model with this cache; empty if they can.
  static std::string unsupported(const common::PagedKernels& kernels, const common::LlamaConfig& config,
                                 const KvCacheShape& shape, const GpuOptions& options);

  // As GpuRunner, for several GPUs, whose shards are loaded at the same time. The GPU with the least memory determines
  // the number of blocks. Throws InputError also if the GPUs cannot connect.
  TensorParallelRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                       int max_sequences, const common::PagedKernels& kernels,
                       const std::optional<common::MemoryShare>& share = {});
  ~TensorParallelRunner() override;
  TensorParallelRunner(const TensorParallelRunner&) = delete;
  TensorParallelRunner& operator=(const TensorParallelRunner&) = delete;

  const CacheSize& cache() const override { return size_; }
  void copy_blocks(std::span<const BlockCopy> copies) override;
  void allocate(int count) override;
  int num_allocated() const override;  // on all GPUs
  std::string why_no_more() const override;
  void copy_beside(std::span<const BlockCopy> copies) override;
  // If it throws on one GPU, the step is dropped on all GPUs; the next step connects them again.
  StepId enqueue(const RaggedBatch& step) override;
  // If it throws on one GPU, all steps in flight are dropped on all GPUs.
  StepResult wait(StepId step) override;
  bool is_asynchronous() const override { return true; }
  void warm_up(int max_tokens, int max_sequences) override;

  // As GpuRunner's.
  common::Matrix logits();
  int num_recorded_steps() const;
  common::Matrix keys(int layer, std::span<const int> slots);
  common::Matrix values(int layer, std::span<const int> slots);

 private:
  using Task = std::function<void(std::size_t rank)>;
  // Runs the task in every GPU's thread. Returns the exception of each, or null.
  std::vector<std::exception_ptr> run(const Task& task);
  // The same; rethrows the first.
  void run_all(const Task& task);
  // For a task in which the GPUs wait for each other: if one fails, no other waits for ever.
  void run_together(const Task& task);
  // Ends the waits of GPUs that have not thrown, and closes all connections.
  void disconnect(const std::vector<std::exception_ptr>& thrown);
  // The columns that each GPU has for its heads or its tokens, side by side in one matrix.
  common::Matrix side_by_side(const std::function<common::Matrix(ShardRunner&)>& part);
  static common::Matrix side_by_side(std::span<const common::Matrix> parts);

  common::NcclGroup group_;
  std::vector<std::unique_ptr<DeviceThread>> threads_;
  std::vector<std::unique_ptr<ShardRunner>> runners_;
  CacheSize size_;  // of all GPUs together
  bool is_connected_ = true;
  StepId last_;                         // the last step that all GPUs have enqueued
  StepId dropped_;                      // up to here, no step can be waited for any more
  std::array<bool, 2> draws_tokens_{};  // of the last two steps
};

}  // namespace
