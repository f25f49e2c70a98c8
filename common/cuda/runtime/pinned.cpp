#include "common/cuda/runtime/pinned.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>

#include "common/base/platform.h"

namespace common {
namespace {

constexpr std::size_t kLarge = std::size_t{1} << 20;

// A program that takes more than there is may be killed.
FloatArray allocate_touched(std::size_t bytes) {
  const std::int64_t available = available_memory_bytes();
  if (available > 0 && bytes > static_cast<std::size_t>(available)) {
    throw std::bad_alloc();
  }
  const std::size_t size = (bytes + sizeof(float) - 1) / sizeof(float);
  FloatArray memory = allocate_floats(size);
  std::fill_n(memory.get(), size, 0.0F);
  return memory;
}

}  // namespace

// Memory that the host has touched is pinned in a few milliseconds. cudaHostAlloc would find and clear the pages
// itself, and while it does, all other threads' calls wait, those of a server's steps too.
PinnedMemory::PinnedMemory(std::size_t bytes) {
  cudaError_t error = cudaErrorMemoryAllocation;
  if (bytes < kLarge) {
    before_device_call("cudaHostAlloc");
    error = cudaHostAlloc(&data_, bytes, cudaHostAllocMapped);
  } else {
    try {
      touched_ = allocate_touched(bytes);
      before_device_call("cudaHostRegister");
      data_ = touched_.get();
      error = cudaHostRegister(data_, bytes, cudaHostRegisterDefault);
    } catch (const std::bad_alloc&) {  // as if the driver had none
    }
  }
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw OutOfPinnedMemory("the host cannot pin " + std::to_string(bytes) + " bytes of memory");
  }
  CUDA_CHECK(error);
}

PinnedMemory::~PinnedMemory() {
  if (touched_ != nullptr) {
    cudaHostUnregister(data_);
  } else {
    cudaFreeHost(data_);
  }
}

}  // namespace common
