// What every CUDA program needs and CUDA itself does not give: checked calls, and owners for memory, streams, events
// and graphs. Usable from .cpp files: nothing here needs nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"

namespace common {

// A CUDA call failed: message, call, file and line. Running out of device memory is OutOfDeviceMemory, so that a
// program can say what to do about it.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class OutOfDeviceMemory : public CudaError {
 public:
  using CudaError::CudaError;
};

[[noreturn]] void cuda_failed(cudaError_t error, const char* call, const char* file, int line);

// True if there is a GPU that this build's kernels can run on: compute capability 8.0 or newer. Asked once.
bool has_cuda_device();

// Of the current device; asked once.
struct DeviceLimits {
  std::string name;
  int num_multiprocessors = 0;
  int compute_capability = 0;              // 90 for 9.0
  std::size_t shared_bytes_per_block = 0;  // with the opt-in that cudaFuncSetAttribute gives
};
const DeviceLimits& device_limits();

// Untyped device memory.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// An array on the device. Copies wait for the device, so they may follow and precede work in any stream.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t size) : memory_(size * sizeof(T)), size_(size) {}
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) { upload(values); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::span<const T>(values)) {}

  T* data() const { return static_cast<T*>(memory_.data()); }
  std::size_t size() const { return size_; }

  void upload(std::span<const T> values);  // as many as there are
  std::vector<T> download() const;

 private:
  DeviceMemory memory_;
  std::size_t size_ = 0;
};

class Event;

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void synchronize() const;
  void wait(const Event& event) const;  // what comes next in the stream, not the host

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const Stream& stream);
  void wait() const;  // until all that the stream had before it is done
  bool is_done() const;
  // Waits for `last`, then gives the time between the two in microseconds.
  static double microseconds(const Event& first, const Event& last);

 private:
  friend class Stream;
  cudaEvent_t event_ = nullptr;
};

// The launches that `enqueue` makes, recorded once and replayed as often as wanted, at far less cost than launching.
class Graph {
 public:
  Graph(const Stream& stream, const std::function<void()>& enqueue);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) const;

 private:
  void discard();

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace common

// Throws CudaError naming the call, file and line.
#define CUDA_CHECK(call)                                                  \
  do {                                                                    \
    const cudaError_t cuda_check_error = (call);                          \
    if (cuda_check_error != cudaSuccess) {                                \
      ::common::cuda_failed(cuda_check_error, #call, __FILE__, __LINE__); \
    }                                                                     \
  } while (false)

namespace common {

template <typename T>
void DeviceArray<T>::upload(std::span<const T> values) {
  COMMON_CHECK(values.size() == size_, "an upload fills the array");
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(memory_.data(), values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  // The call may return while the last bytes are on their way, and a stream does not wait for them.
  CUDA_CHECK(cudaDeviceSynchronize());
}

template <typename T>
std::vector<T> DeviceArray<T>::download() const {
  std::vector<T> values(size_);
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(values.data(), memory_.data(), size_ * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

}  // namespace common
