#include "shard_runner.h"

#include "../kernels/step_buffers.h"
#include "common/cuda/model/cuda_llama.h"
#include "common/cuda/runtime/device.h"

namespace stage8 {

ShardRunner::ShardRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options,
                         int chunk_size, int max_sequences, const common::PagedKernels& kernels,
                         const std::optional<common::MemoryShare>& share, common::Communicator& peers)
    : RecordingRunner(model, shape, options, chunk_size, max_sequences, kernels, share, &peers), peers_(peers) {
  SharedReading::share(false);  // it has been tested on single GPUs only
}

StepId ShardRunner::enqueue(const RaggedBatch& batch) {
  // The next step has the buffers of the step before the last, which may never end if another GPU has failed.
  const StepBuffers& next = buffers({last().value + 1});
  try {
    peers_.wait([&] { return next.is_finished(); });
  } catch (...) {
    abandon(next);
    throw;
  }
  return RecordingRunner::enqueue(batch);
}

StepResult ShardRunner::wait(StepId step) {
  const StepBuffers& own = buffers(step);
  peers_.wait([&] { return own.is_finished(); });
  return RecordingRunner::wait(step);
}

// Recovery needs all peers together.
void ShardRunner::abandon(const StepBuffers& /*step*/) noexcept { peers_.fail(); }

void ShardRunner::finish() noexcept {
  if (!peers_.wait_quietly([&] { return buffers({0}).is_finished() && buffers({1}).is_finished(); })) {
    disconnect();
  }
}

void ShardRunner::drop_step(bool has_step, StepId newest) {
  const StepBuffers& before = buffers({last().value - (has_step ? 1 : 0)});
  (void)peers_.wait_quietly([&] { return before.is_finished(); });
  model().stop_sums();
  skip_to(newest);
}

bool ShardRunner::is_idle() const { return cudaStreamQuery(stream().get()) != cudaErrorNotReady; }

void ShardRunner::disconnect() {
  forget_recorded();  // recorded steps belong to the connection
  model().stop_sums();
  peers_.abort();
  for (const StepId step : {StepId{0}, StepId{1}}) {
    buffers(step).abandon(stream());
  }
}

void ShardRunner::connect() { model().reset_sums(); }

}  // namespace
