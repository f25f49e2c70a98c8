// A model that several GPUs compute together, each with its heads of every block: a runner that has runners. All of
// them get the same steps, so one block table serves them all.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../gpu_runner.h"
#include "common/cuda/several/nccl_group.h"
#include "device_thread.h"

namespace stage8 {

class TensorParallelRunner : public Runner {
 public:
  // Why so many GPUs can't compute this model with this cache; empty if they can.
  static std::string unsupported(const common::LlamaConfig& config, const KvCacheShape& shape,
                                 const GpuOptions& options);

  // As GpuRunner, but for the number of GPUs, whose shards are loaded at the same time. The GPU with the least memory
  // says how many blocks there are. Throws InputError also if the GPUs do not find each other.
  TensorParallelRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                       int max_sequences, const std::optional<MemoryShare>& share = {});
  ~TensorParallelRunner() override;
  TensorParallelRunner(const TensorParallelRunner&) = delete;
  TensorParallelRunner& operator=(const TensorParallelRunner&) = delete;

  const CacheSize& cache() const override { return size_; }
  void copy_blocks(std::span<const BlockCopy> copies) override;
  // If it throws on one GPU, it is taken back on all; the next step connects them anew.
  void enqueue(const RaggedBatch& step) override;
  StepResult wait(int step_age) override;
  bool is_asynchronous() const override { return true; }
  void warm_up(int max_tokens, int max_sequences) override;
  std::optional<ReadLimit> read_limit() override;  // of all GPUs together

  // As GpuRunner's.
  common::Matrix logits();
  std::vector<common::Token> drawn_tokens(int step_age);
  int num_recorded_steps() const;
  common::Matrix keys(int layer, std::span<const int> slots);
  common::Matrix values(int layer, std::span<const int> slots);

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
  common::Matrix side_by_side(const std::function<common::Matrix(GpuRunner&)>& part);

  common::NcclGroup group_;
  std::vector<std::unique_ptr<DeviceThread>> threads_;
  std::vector<std::unique_ptr<GpuRunner>> runners_;
  CacheSize size_;  // of all GPUs together
  bool is_connected_ = true;
};

}  // namespace
