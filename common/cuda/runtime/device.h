// Checked CUDA calls, and owners for device memory, streams, events and graphs. This header can be included without
// nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"

namespace common {

// A CUDA call failed; what() has message, call, file and line. Out of memory is a class of its own, so that a program
// can suggest what to do.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class OutOfDeviceMemory : public CudaError {
 public:
  using CudaError::CudaError;
};

// For tests: called before each call that is checked, with its text. If it throws, the call has failed: it is not made.
using DeviceCallHook = void (*)(const char* call);
extern DeviceCallHook device_call_hook;

inline void before_device_call(const char* call) {
  if (device_call_hook != nullptr) {
    device_call_hook(call);
  }
}

[[noreturn]] void cuda_failed(cudaError_t error, const char* call, const char* file, int line);

// Why this build's kernels cannot run on the first GPU, in one line for the user; empty if they can. Determined once.
const std::string& device_obstacle();
inline bool has_cuda_device() { return device_obstacle().empty(); }

// Whether kernels were compiled for the current device's architecture, from 9.0 on. Kernels for an older architecture
// run too, but without what only the newer one has (probe.cu).
bool kernels_are_native();
// Whether the current device can load the kernels that this build has (probe.cu).
bool can_load_kernels();

// Whether this build has the kernels for GPUs on which a thread block has less than 227 KB of shared memory (launch.h).
bool serves_small_memory();

int current_device();

// A value for each device, determined when it is first asked for.
template <typename T>
class PerDevice {
 public:
  // find() determines the current device's. The reference stays valid.
  template <typename Find>
  const T& get(const Find& find) {
    std::atomic<const T*>& place = values_.at(static_cast<std::size_t>(current_device()));
    const T* value = place.load(std::memory_order_acquire);
    if (value == nullptr) {
      const std::lock_guard lock(mutex_);
      value = place.load(std::memory_order_relaxed);
      if (value == nullptr) {
        value = &found_.emplace_back(find());
        place.store(value, std::memory_order_release);
      }
    }
    return *value;
  }

 private:
  static constexpr std::size_t kMaxDevices = 64;
  std::array<std::atomic<const T*>, kMaxDevices> values_{};
  std::mutex mutex_;
  std::deque<T> found_;
};

// Properties of the current device.
struct DeviceLimits {
  std::string name;
  int num_multiprocessors = 0;
  int compute_capability = 0;              // 90 for 9.0
  std::size_t shared_bytes_per_block = 0;  // the maximum, which a kernel gets after cudaFuncSetAttribute
  double memory_bandwidth = 0.0;           // bytes per second, from the memory's clock and the width of its bus
};
const DeviceLimits& device_limits();

// For tests: thread blocks can have this much shared memory and no more, as on a smaller GPU.
extern std::size_t shared_memory_limit;

// The maximum on the current device.
inline std::size_t shared_bytes_per_block() {
  return std::min(device_limits().shared_bytes_per_block, shared_memory_limit);
}

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

// An array in device memory. Copies synchronise with the whole device, so they are ordered with work in any stream.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t size) : memory_(size * sizeof(T)), size_(size) {}
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) { upload(values); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::span<const T>(values)) {}

  T* data() const { return static_cast<T*>(memory_.data()); }
  std::size_t size() const { return size_; }

  void upload(std::span<const T> values);  // exactly size() values
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
  void wait(const Event& event) const;  // makes later work in the stream wait; the host does not

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
  void wait() const;  // until the stream has finished everything before the event
  bool is_done() const;
  // Waits for `last`, then returns the microseconds between the two.
  static double microseconds(const Event& first, const Event& last);

 private:
  friend class Stream;
  cudaEvent_t event_ = nullptr;
};

// The work that `enqueue` enqueues on the stream, recorded once. Replaying it costs far less than launching each
// kernel.
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
    ::common::before_device_call(#call);                                  \
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
  // cudaMemcpy may return before the last bytes have arrived, and a non-blocking stream does not wait for them.
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
