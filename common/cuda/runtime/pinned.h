// Host memory that the device can copy from and to while the host continues.
#pragma once

#include <cstddef>

#include "common/base/memory.h"
#include "common/cuda/runtime/device.h"

namespace common {

// The host cannot pin that much memory.
class OutOfPinnedMemory : public CudaError {
 public:
  using CudaError::CudaError;
};

// Throws OutOfPinnedMemory.
class PinnedMemory {
 public:
  explicit PinnedMemory(std::size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  void* data() const { return data_; }

 private:
  FloatArray touched_;  // of a large one; null: the memory is the driver's
  void* data_ = nullptr;
};

// The device can also write to it directly, if it is small. The host may read what was written once the stream has
// finished.
template <typename T>
class PinnedArray {
 public:
  explicit PinnedArray(std::size_t size) : memory_(size * sizeof(T)), size_(size) {}

  T* data() const { return static_cast<T*>(memory_.data()); }
  std::size_t size() const { return size_; }

 private:
  PinnedMemory memory_;
  std::size_t size_;
};

}  // namespace common
