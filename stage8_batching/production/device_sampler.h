// Draws a step's tokens on the device, so that the host can be a step ahead whatever the requests' options are.
#pragma once

#include <array>
#include <cstddef>

#include "../kernels/step_sampler.h"
#include "common/cuda/model/cuda_sampler.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/several/communicator.h"
#include "sampling_inputs.h"

namespace stage8 {

// Not recorded: its launches depend on the requests' options.
class DeviceSampler : public StepSampler {
 public:
  // vocab_size: the whole model's. peers: the other GPUs, which have a part of the logits each; nullptr: there are
  // none.
  DeviceSampler(int vocab_size, int max_rows, common::Communicator* peers);
  void upload(std::size_t which, const RaggedBatch& batch, const common::Stream& stream) override;
  void draw(std::size_t which, const DeviceStep& step, const common::Stream& stream) override;

 private:
  // Every GPU gets the logits of the whole vocabulary, [num_rows, vocab_size], and draws the same tokens.
  float* gather(const float* own, int num_rows, const common::Stream& stream);

  int vocab_size_;
  common::Communicator* peers_;
  std::array<SamplingInputs, 2> inputs_;
  common::DeviceArray<float> gathered_;      // with peers: [number of GPUs, num_rows, a GPU's part of vocab_size]
  common::DeviceArray<float> whole_logits_;  // with peers: [num_rows, vocab_size]
  common::CudaSampler sampler_;
};

}  // namespace
