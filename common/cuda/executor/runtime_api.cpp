#include "common/cuda/executor/runtime_api.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "common/base/check.h"

namespace common::executor {

struct Graph {
  std::vector<std::function<void()>> work;
};

struct Event {
  std::chrono::steady_clock::time_point time;
  int num_recorded = 0;
  int num_reached = 0;  // how many of these its streams have reached
};

struct Stream {
  // Done when the event has been reached as often as it was recorded then.
  struct Work {
    std::function<void()> work;
    const Event* awaited = nullptr;
    int count = 0;
  };

  bool is_ready() const {
    return !queue.empty() &&
           (queue.front().awaited == nullptr || queue.front().awaited->num_reached >= queue.front().count);
  }

  Graph* captured = nullptr;
  bool is_shuffled = false;
  std::deque<Work> queue;
};

namespace {

std::vector<Stream*> streams;  // those that are shuffled
std::minstd_rand order;
bool is_shuffled = false;

void run_one() {
  std::vector<Stream*> ready;
  for (Stream* stream : streams) {
    if (stream->is_ready()) {
      ready.push_back(stream);
    }
  }
  COMMON_CHECK(!ready.empty(), "some stream can go on");
  Stream& chosen = *ready[order() % ready.size()];
  const Stream::Work next = std::move(chosen.queue.front());
  chosen.queue.pop_front();
  if (next.work) {
    next.work();
  }
}

void run_all() {
  for (const Stream* stream : streams) {
    while (!stream->queue.empty()) {
      run_one();
    }
  }
}

}  // namespace

void shuffle_streams(unsigned seed) {
  is_shuffled = seed != 0;
  order.seed(seed);
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->captured != nullptr) {
    stream->captured->work.push_back(std::move(work));
  } else if (stream != nullptr && stream->is_shuffled) {
    stream->queue.push_back({std::move(work)});
  } else {
    work();
  }
  return cudaSuccess;
}

}  // namespace common::executor

using namespace common::executor;  // NOLINT(google-build-using-namespace): this file is the API's implementation

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no device";
    case cudaErrorNotReady:
      return "not ready";
  }
  return "unknown error";
}
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  std::snprintf(properties->name, sizeof(properties->name), "the executor");
  properties->multiProcessorCount = kNumMultiprocessors;
  properties->major = kComputeCapability / 10;
  properties->minor = kComputeCapability % 10;
  properties->sharedMemPerBlockOptin = kMaxSharedBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  *value = 0;  // its memory has no bus
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  run_all();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  *pointer = allocate(bytes);
  return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  run_all();
  common::executor::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned /*flags*/) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }
cudaError_t cudaHostRegister(void* /*pointer*/, std::size_t /*bytes*/, unsigned /*flags*/) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void* /*pointer*/) {
  run_all();
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = free_bytes();
  *total = total_bytes();
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int byte, std::size_t bytes) {
  if (bytes > 0) {
    std::memset(to, byte, bytes);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/) {
  if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return enqueue(stream, [=] { (void)cudaMemcpy(to, from, bytes, kind); });
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return enqueue(stream, [=] {
    for (std::size_t row = 0; row < height; ++row) {
      (void)cudaMemcpy(static_cast<std::byte*>(to) + row * to_pitch,
                       static_cast<const std::byte*>(from) + row * from_pitch, width, kind);
    }
  });
}
cudaError_t cudaMemsetAsync(void* to, int byte, std::size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { (void)cudaMemset(to, byte, bytes); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = new Stream;
  if (is_shuffled) {
    (*stream)->is_shuffled = true;
    streams.push_back(*stream);
  }
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  run_all();
  std::erase(streams, stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  while (stream != nullptr && !stream->queue.empty()) {
    run_one();
  }
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  if (stream->is_shuffled) {
    stream->queue.push_back({{}, event, event->num_recorded});
  }
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  stream->captured = new Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = std::exchange(stream->captured, nullptr);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  *executable = new Graph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  for (const std::function<void()>& work : executable->work) {
    (void)enqueue(stream, work);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new Event;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  run_all();
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const int number = event->num_recorded += stream != nullptr && stream->is_shuffled ? 1 : 0;
  return enqueue(stream, [event, number] {
    event->time = std::chrono::steady_clock::now();
    event->num_reached = number;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  while (event->num_reached < event->num_recorded) {
    run_one();
  }
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->num_reached < event->num_recorded ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* /*kernel*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return cudaSuccess;
}
