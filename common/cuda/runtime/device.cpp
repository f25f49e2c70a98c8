#include "common/cuda/runtime/device.h"

#include <limits>

#include "common/cuda/runtime/device_obstacle.h"

namespace common {

DeviceCallHook device_call_hook = nullptr;
std::size_t shared_memory_limit = std::numeric_limits<std::size_t>::max();

void cuda_failed(cudaError_t error, const char* call, const char* file, int line) {
  const std::string message = std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                              cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  (void)cudaGetLastError();  // resets the error, which a later check would report again
  if (error == cudaErrorMemoryAllocation) {
    throw OutOfDeviceMemory(message);
  }
  throw CudaError(message);
}

const std::string& device_obstacle() {
  static const std::string obstacle = [] {
    DeviceFindings found;
    found.architectures = COURSE_CUDA_ARCHITECTURES;
    (void)cudaDriverGetVersion(&found.driver_version);
    (void)cudaRuntimeGetVersion(&found.runtime_version);
    const cudaError_t error = cudaGetDeviceCount(&found.num_devices);
    if (error != cudaSuccess) {
      found.num_devices = 0;
      found.error = error == cudaErrorNoDevice ? "" : cudaGetErrorString(error);
    } else if (found.num_devices > 0) {
      found.name = device_limits().name;
      found.compute_capability = device_limits().compute_capability;
      found.has_kernels = can_load_kernels();
    }
    (void)cudaGetLastError();
    return obstacle_of(found);
  }();
  return obstacle;
}

int current_device() {
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

const DeviceLimits& device_limits() {
  static PerDevice<DeviceLimits> limits;
  return limits.get([] {
    const auto attribute = [](cudaDeviceAttr which) {
      int value = 0;
      CUDA_CHECK(cudaDeviceGetAttribute(&value, which, current_device()));
      return value;
    };
    // Two transfers a clock; kilohertz times bits.
    const double memory_bandwidth =
        2.0 * 1e3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8.0;
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, current_device()));
    return DeviceLimits{.name = properties.name,
                        .num_multiprocessors = properties.multiProcessorCount,
                        .compute_capability = properties.major * 10 + properties.minor,
                        .shared_bytes_per_block = properties.sharedMemPerBlockOptin,
                        .memory_bandwidth = memory_bandwidth};
  });
}

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  before_device_call("cudaMalloc");
  const cudaError_t error = cudaMalloc(&data_, bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw OutOfDeviceMemory("the GPU is out of memory: " + std::to_string(bytes) + " bytes requested, " +
                            std::to_string(free_bytes) + " of " + std::to_string(total_bytes) + " free");
  }
  CUDA_CHECK(error);
}

DeviceMemory::~DeviceMemory() { (void)cudaFree(data_); }

Stream::Stream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }

Stream::~Stream() { (void)cudaStreamDestroy(stream_); }

void Stream::synchronize() const { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

void Stream::wait(const Event& event) const { CUDA_CHECK(cudaStreamWaitEvent(stream_, event.event_)); }

Event::Event() { CUDA_CHECK(cudaEventCreate(&event_)); }

Event::~Event() { (void)cudaEventDestroy(event_); }

void Event::wait() const { CUDA_CHECK(cudaEventSynchronize(event_)); }

void Event::record(const Stream& stream) { CUDA_CHECK(cudaEventRecord(event_, stream.get())); }

bool Event::is_done() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status != cudaErrorNotReady) {
    CUDA_CHECK(status);
  }
  return status == cudaSuccess;
}

double Event::microseconds(const Event& first, const Event& last) {
  CUDA_CHECK(cudaEventSynchronize(last.event_));
  float milliseconds = 0.0F;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, first.event_, last.event_));
  return 1e3 * static_cast<double>(milliseconds);
}

Graph::Graph(const Stream& stream, const std::function<void()>& enqueue) {
  CUDA_CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  try {
    enqueue();
    CUDA_CHECK(cudaStreamEndCapture(stream.get(), &graph_));
    CUDA_CHECK(cudaGraphInstantiate(&executable_, graph_, 0));
  } catch (...) {
    if (graph_ == nullptr) {
      (void)cudaStreamEndCapture(stream.get(), &graph_);  // the stream must leave capture mode
    }
    discard();
    throw;
  }
}

// For a constructor that throws, because the destructor is not called then.
void Graph::discard() {
  if (graph_ != nullptr) {
    (void)cudaGraphDestroy(graph_);
  }
  (void)cudaGetLastError();
}

Graph::~Graph() {
  (void)cudaGraphExecDestroy(executable_);
  (void)cudaGraphDestroy(graph_);
}

void Graph::launch(const Stream& stream) const { CUDA_CHECK(cudaGraphLaunch(executable_, stream.get())); }

}  // namespace common
