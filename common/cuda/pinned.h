// Host memory that the device copies from and to while the host goes on.
#pragma once

#include <cstddef>

#include "common/cuda/device.h"

namespace common {

// Both see it: the device may also write to it directly, and the host reads that once the stream is done.
template <typename T>
class PinnedArray {
 public:
  explicit PinnedArray(std::size_t size) : size_(size) {
    void* data = nullptr;
    CUDA_CHECK(cudaHostAlloc(&data, size * sizeof(T), cudaHostAllocMapped));
    data_ = static_cast<T*>(data);
  }
  ~PinnedArray() { cudaFreeHost(data_); }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;

  T* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace common
