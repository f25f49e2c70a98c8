// Sums of parts from several GPUs; each GPU adds the sum to its residual stream.
//
// NCCL adds up the parts, and its sum is added to the residual stream. With few tokens, every layer has two sums of
// some KB each; starting such a sum takes longer than moving its bytes. With AllReduce::kPeer the kernel that adds to
// the residual stream then reads the other GPUs' parts where they lie: the thread blocks for a token tell each other
// that their GPU's part is there, and then all read all parts, in the same order.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>

#include "common/cuda/model/fused_linear.h"
#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/precision.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "common/cuda/several/communicator.h"

namespace common {

class PeerSums {
 public:
  // There are two sums, used in turn: while a GPU still reads the parts of one, another GPU writes the parts of the
  // next. bytes: the size of a part, or 0 without peers. All peers must construct this. Throws OutOfDeviceMemory.
  PeerSums(Communicator* peers, std::size_t bytes);

  // This GPU's part of sum 0 or 1: [num_tokens, num_cols].
  void* part(int which) const { return parts_[static_cast<std::size_t>(which)].data(); }
  // Adds the sum of all parts to the residual stream. part_type: the parts' type, equal on all GPUs.
  void add(int which, Precision part_type, Precision precision, int num_tokens, const Residual& residual,
           const Normed& normed, cudaStream_t stream);

  // To be called when a GPU has failed: sums that wait for its part end without it.
  void stop() noexcept;
  // To be called after stop(), when no sum is still running and before the next sum on any GPU.
  void reset();

 private:
  Communicator* peers_;
  std::array<DeviceMemory, 2> parts_;
  bool is_direct_ = false;  // whether kernels read the other GPUs' parts
  DeviceArray<unsigned> arrived_;
  DeviceArray<unsigned> num_sums_;
  PinnedArray<int> stop_;
  std::array<PartialSum, 2> sums_;
};

}  // namespace common
