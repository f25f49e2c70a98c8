// The part of CUDA's runtime that common/cuda/runtime and the kernels' launches call, on the executor. A stream's work
// is done when it is enqueued, unless the stream is being captured: then it becomes part of a graph. For tests, streams
// can also work as late as they may, and in any order that their events allow (shuffle_streams).
#pragma once

#include <cstddef>
#include <functional>
#include <tuple>

#include "common/cuda/executor/cuda_on_host.h"

// NOLINTBEGIN(readability-identifier-naming): the names are CUDA's

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoDevice = 100,
  cudaErrorNotReady = 600,
};
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();

struct cudaDeviceProp {
  char name[64];
  int multiProcessorCount;
  int major;
  int minor;
  std::size_t sharedMemPerBlockOptin;
};
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
enum cudaDeviceAttr { cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth };
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
cudaError_t cudaMalloc(void** pointer, std::size_t bytes);
cudaError_t cudaFree(void* pointer);
inline constexpr unsigned cudaHostAllocMapped = 2;
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned flags);
inline constexpr unsigned cudaHostRegisterDefault = 0;
cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* pointer);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes);
cudaError_t cudaMemset(void* to, int byte, std::size_t bytes);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);

namespace common::executor {
struct Stream;
struct Event;
struct Graph;
}  // namespace common::executor

using cudaStream_t = common::executor::Stream*;
using cudaEvent_t = common::executor::Event*;
using cudaGraph_t = common::executor::Graph*;
using cudaGraphExec_t = common::executor::Graph*;
enum { cudaStreamNonBlocking = 1 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* to, int byte, std::size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last);

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum { cudaSharedmemCarveoutMaxShared = 100 };
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes;  // static arrays: not known here
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* /*attributes*/, Kernel* /*kernel*/) {
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttributeValue {
  int programmaticStreamSerializationAllowed;
  struct {
    unsigned x, y, z;
  } clusterDim;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace common::executor {
// Work of streams that are created from now on is done only when the host waits for it, and in an order between the
// streams that the seed draws. 0: at once again. For one thread that enqueues work.
void shuffle_streams(unsigned seed);
// Does it or enqueues it, or adds it to the graph that the stream is being captured for.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);
}  // namespace common::executor

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      return cudaErrorInvalidValue;  // the executor has no clusters
    }
  }
  const dim3& grid = config->gridDim;
  const dim3& block = config->blockDim;
  return common::executor::enqueue(
      config->stream, [=, values = std::tuple<std::decay_t<Parameters>...>(arguments...),
                       sizes = std::tuple(grid, block), shared_bytes = config->dynamicSmemBytes] {
        const auto& [of_grid, of_block] = sizes;
        common::executor::run_grid({of_grid.x, of_grid.y, of_grid.z}, {of_block.x, of_block.y, of_block.z},
                                   shared_bytes, [&] { std::apply(kernel, values); });
      });
}

// NOLINTEND(readability-identifier-naming)
