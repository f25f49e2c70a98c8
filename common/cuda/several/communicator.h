// How GPUs that compute one model together exchange data. Each has a communicator, which one thread uses. All of them
// must make the same calls in the same order; the work of a call ends only after every GPU has enqueued it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "common/cuda/precision.h"
#include "common/cuda/several/all_reduce.h"
#include "common/cuda/several/shard.h"

namespace common {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual Shard shard() const = 0;
  virtual AllReduce all_reduce() const = 0;

  // Enqueues on the stream, which may be captured. Each number becomes the sum, or the maximum, over all GPUs.
  virtual void sum(void* values, std::size_t count, Precision type, cudaStream_t stream) = 0;
  virtual void max(unsigned long long* values, std::size_t count, cudaStream_t stream) = 0;
  // all: [number of GPUs, count]
  virtual void gather(const float* own, std::size_t count, float* all, cudaStream_t stream) = 0;

  // Waits until the threads of all GPUs have called this, and returns their numbers by rank.
  virtual std::vector<std::int64_t> exchange(std::int64_t own) = 0;
  std::int64_t smallest(std::int64_t own) {
    const std::vector<std::int64_t> all = exchange(own);
    return *std::min_element(all.begin(), all.end());
  }

  // Waits until is_done(). Throws CudaError if another GPU fails meanwhile, or if it takes too long: the enqueued work
  // may then never end.
  virtual void wait(const std::function<bool()>& is_done) = 0;
  // The same for work that every GPU has certainly enqueued. Returns false if it takes too long.
  virtual bool wait_quietly(const std::function<bool()>& is_done) noexcept = 0;
  // Reports to the others that this GPU has failed.
  virtual void fail() noexcept = 0;
  // Ends this GPU's enqueued work that waits for other GPUs, with wrong results, and reports that to the others. There
  // must be no recorded steps.
  virtual void abort() noexcept = 0;
};

}  // namespace common
