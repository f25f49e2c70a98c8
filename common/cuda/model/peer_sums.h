// Sums of parts from several GPUs; each GPU adds the sum to its residual stream.
//
// NCCL adds up the parts, and its sum is added to the residual stream. With few tokens, every layer has two sums of
// some KB each; starting such a sum takes longer than moving its bytes. With AllReduce::kPeer there are two ways more,
// in which kernels access the other GPUs' memory:
//
// - Up to kMaxPushedTokens tokens, fused products store their parts in the memory of all GPUs (pushed_sum.h).
// - With some more, and for the library's products, the kernel that adds to the residual stream fetches the other GPUs'
//   parts where they lie: the thread blocks for a token tell each other that their GPU's part is there, and then all
//   read all parts, in the same order.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>

#include "common/cuda/model/fused_linear.h"
#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/model/pushed_sum.h"
#include "common/cuda/precision.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "common/cuda/several/communicator.h"

namespace common {

class PeerSums {
 public:
  // Sums are numbered from 0 in every step. Even and odd ones have memory of their own: while a GPU still reads the
  // parts of one, another GPU writes the parts of the next.
  // part_bytes: the size of a part, or 0 without peers. num_cols: of the residual stream. Takes two parts of memory,
  // and with AllReduce::kPeer 1 KiB more for each column and GPU: 8 MiB for 4,096 columns and two GPUs. All peers must
  // construct this. Throws OutOfDeviceMemory.
  PeerSums(Communicator* peers, std::size_t part_bytes, int num_cols);

  // Before the first sum of a step whose products are fused. num_sums: in the step, an even number. A launch that does
  // not overlap must come before the first sum.
  void begin_fused(int num_tokens, int num_sums, cudaStream_t stream);
  // Adds the sum of all GPUs' products to the residual stream. A sum that is normalised first is fetched, not pushed:
  // a pushed one's columns are spread over thread blocks that do not wait for each other.
  void add_fused(int sum, const FusedLinear& linear, const SumNorm& norm, const Residual& residual,
                 cudaStream_t stream);

  // This GPU's part of a sum: [num_tokens, num_cols].
  void* part(int sum) const { return parts_[place(sum)].data(); }
  // Adds the sum of all parts to the residual stream. part_type: the parts' type, equal on all GPUs.
  void add(int sum, Precision part_type, Precision precision, int num_tokens, const SumNorm& norm,
           const Residual& residual, const Normed& normed, cudaStream_t stream);

  // To be called when a GPU has failed: sums that wait for its part end without it.
  void stop() noexcept;
  // To be called after stop(), when no sum is still running and before the next sum on any GPU.
  void reset();

 private:
  static std::size_t place(int sum) { return static_cast<std::size_t>(sum % 2); }
  bool pushes(int num_tokens) const { return is_direct_ && num_tokens <= kMaxPushedTokens; }

  Communicator* peers_;
  std::array<DeviceMemory, 2> parts_;
  bool is_direct_ = false;  // whether kernels access the other GPUs' memory
  PinnedArray<int> stop_;
  // Fetched sums.
  DeviceArray<unsigned> arrived_;
  DeviceArray<unsigned> num_sums_;
  std::array<PartialSum, 2> sums_;
  // Pushed sums.
  std::array<DeviceArray<PushedPair>, 2> received_;  // [GPUs, kMaxPushedTokens, num_cols / 2]: all parts
  DeviceArray<unsigned> first_numbers_;
  std::array<PushedPart, 2> pushed_parts_;
  std::array<PushedSum, 2> pushed_sums_;
};

}  // namespace common
