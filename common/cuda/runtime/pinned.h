// Host memory that the device can copy from and to while the host continues.
#pragma once

#include <cstddef>
#include <string>

#include "common/cuda/runtime/device.h"

namespace common {

// The host cannot pin that much memory.
class OutOfPinnedMemory : public CudaError {
 public:
  using CudaError::CudaError;
};

// The device can also write to it directly. The host may read what was written once the stream has finished.
template <typename T>
class PinnedArray {
 public:
  explicit PinnedArray(std::size_t size) : size_(size) {
    void* data = nullptr;
    before_device_call("cudaHostAlloc");
    const cudaError_t error = cudaHostAlloc(&data, size * sizeof(T), cudaHostAllocMapped);
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      throw OutOfPinnedMemory("the host cannot pin " + std::to_string(size * sizeof(T)) + " bytes of memory");
    }
    CUDA_CHECK(error);
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
