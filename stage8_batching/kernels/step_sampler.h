// Draws the tokens of a GpuRunner's steps, where the largest logit does not decide. The runner has one for both steps
// that can be in flight; `which`, 0 or 1, says whose buffers a step has.
#pragma once

#include <array>
#include <cstddef>

#include "../batch.h"
#include "common/cuda/runtime/device.h"

namespace stage8 {

class StepSampler {
 public:
  virtual ~StepSampler() = default;

  // Takes the batch's sampling_rows; what it copies to the device, it enqueues in `stream`. The last step that used
  // these buffers must be over.
  virtual void upload(std::size_t which, const RaggedBatch& batch, const common::Stream& stream) = 0;

  // On the device, when the stream gets there: a step's logits, and where its tokens and those of the step before it
  // lie.
  struct DeviceStep {
    float* logits = nullptr;              // [num_rows, vocab_size], with several GPUs this one's columns; may change
    const int* token_rows = nullptr;      // [num_rows]: each row's token of the step
    const int* tokens = nullptr;          // [num_tokens]
    const int* pending_rows = nullptr;    // [num_tokens]: StepInputs::pending_rows()
    const int* pending_tokens = nullptr;  // by row of the step before
    int* next_tokens = nullptr;           // [num_rows]: those with the largest logits, -1: there is none
  };
  // Replaces next_tokens by drawn tokens, and leaves -1 where there is none to draw.
  virtual void draw(std::size_t which, const DeviceStep& step, const common::Stream& stream) = 0;
};

// Waits for the logits and draws on the host, as a CpuRunner does. So a step that draws by chance is over when it is
// enqueued; production/device_sampler.h does not wait.
class HostSampler : public StepSampler {
 public:
  explicit HostSampler(int vocab_size) : vocab_size_(vocab_size) {}
  void upload(std::size_t which, const RaggedBatch& batch, const common::Stream& stream) override;
  void draw(std::size_t which, const DeviceStep& step, const common::Stream& stream) override;

 private:
  int vocab_size_;
  std::array<RaggedBatch, 2> batches_;
};

}  // namespace
