// What GPUs that compute one model together tell each other. Each has a communicator, which one thread uses. All of
// them have to make the same calls in the same order; what a call enqueues ends once it has been enqueued everywhere.
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

  // Enqueued on the stream, which may be captured. Each number becomes the sum, or the largest, of all GPUs'.
  virtual void sum(void* values, std::size_t count, Precision type, cudaStream_t stream) = 0;
  virtual void max(unsigned long long* values, std::size_t count, cudaStream_t stream) = 0;
  // all: [number of GPUs, count]
  virtual void gather(const float* own, std::size_t count, float* all, cudaStream_t stream) = 0;

  // The numbers that all GPUs' threads call this with, by rank. Waits for them.
  virtual std::vector<std::int64_t> exchange(std::int64_t own) = 0;
  std::int64_t smallest(std::int64_t own) {
    const std::vector<std::int64_t> all = exchange(own);
    return *std::min_element(all.begin(), all.end());
  }

  // Waits until is_done(). Throws CudaError if another GPU has failed in the meantime, or if it takes too long: what
  // has been enqueued may never end then.
  virtual void wait(const std::function<bool()>& is_done) = 0;
  // The same for what has certainly been enqueued everywhere. Returns false if it takes too long.
  virtual bool settle(const std::function<bool()>& is_done) noexcept = 0;
  // The others learn that this GPU has failed.
  virtual void fail() noexcept = 0;
  // What has been enqueued here and waits for other GPUs ends, with wrong results; and the others learn of it. There
  // must be no recorded steps.
  virtual void abort() noexcept = 0;
};

}  // namespace common
