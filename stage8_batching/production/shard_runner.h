// One of several GPUs that compute a model together (tensor_parallel_runner.h): it computes what a single one would,
// with its shard, and never waits for ever for the others.
#pragma once

#include "recording_runner.h"

namespace stage8 {

class ShardRunner : public RecordingRunner {
 public:
  // As RecordingRunner. peers must outlive the runner.
  ShardRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
              int max_sequences, const common::PagedKernels& kernels, const std::optional<common::MemoryShare>& share,
              common::Communicator& peers);
  ~ShardRunner() override { finish(); }  // freeing memory waits for the GPU, which may wait for others

  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;

  // Waits for all enqueued work, or ends it if it waits for a GPU that has failed. May be called twice.
  void finish() noexcept;

  using GpuRunner::last;

  // After a peer has failed, to be called in this order. drop_step waits for the step before the failed one, which
  // every peer has enqueued completely, and drops the failed step; has_step: this peer has enqueued it. newest: the
  // newest step of all peers; later steps have ids beyond it.
  void drop_step(bool has_step, StepId newest);
  bool is_idle() const;  // whether no enqueued work waits for another GPU
  void disconnect();     // ends work that waits for another GPU
  void connect();        // after disconnect() of all peers, and before the next step of any peer

 protected:
  void abandon(const StepBuffers& step) noexcept override;

 private:
  common::Communicator& peers_;
};

}  // namespace
