// Kernel launches that may overlap with the previous launch. Two instructions make this safe (ptx.cuh):
// wait_for_previous_launch() and allow_next_launch(). For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "common/cuda/runtime/device.h"

namespace common {

// Whether this file's kernels were compiled for this GPU's architecture and so contain the instruction that waits for
// the previous launch. Kernels for older architectures run on newer GPUs too, compiled at run time, but lack it.
inline bool can_overlap() {
#ifdef __CUDA_ARCH_LIST__
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture == 10 * device_limits().compute_capability && architecture >= 900) {
      return true;
    }
  }
#endif
  return false;
}

// Whether this file's kernels are compiled for a GPU with less shared memory than Hopper and Blackwell in data centres
// have. There a thread block can have 227 KB, on an A100 163 KB, and on smaller chips 99 KB. A build for data centres
// alone leaves out the kernels with small rings: half of the kernels for products.
constexpr bool kServesSmallMemory = [] {
#ifdef __CUDA_ARCH_LIST__
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture != 900 && architecture != 1000 && architecture != 1030) {
      return true;
    }
  }
  return false;
#else
  return true;
#endif
}();
inline constexpr const char* kNeedsMoreSharedMemory =
    "these kernels were built for GPUs with more shared memory than this one has";

// kPrevious: the kernel may start while the previous launch still runs (programmatic dependent launch, which has no
// effect below compute capability 9.0), so it must call wait_for_previous_launch() before it reads what that launch may
// write, or writes what it may read. kPreviousWithoutL1: the same, and all on-chip memory of a multiprocessor is
// configured as shared memory. Because that configuration can change only while a multiprocessor is idle, launches that
// need much shared memory then follow each other without a pause. A kernel that relies on L1 is slower for it.
enum class Overlap { kNone, kPrevious, kPreviousWithoutL1 };

// Gives the kernel's launches shared_bytes of shared memory; without_l1: configures all on-chip memory as shared
// memory. Remembers what is set, because setting an attribute takes as long as launching a kernel.
void prepare_kernel(const void* kernel, std::size_t shared_bytes, bool without_l1);

// Starts kernel<<<grid, threads, shared_bytes, stream>>>(arguments...) in clusters of cluster_size blocks.
template <typename... Parameters, typename... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, int cluster_size, int threads, std::size_t shared_bytes,
                     cudaStream_t stream, Overlap overlap, const Arguments&... arguments) {
  prepare_kernel(reinterpret_cast<const void*>(kernel), shared_bytes, overlap == Overlap::kPreviousWithoutL1);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.attrs = attributes;
  if (overlap != Overlap::kNone && can_overlap()) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster_size > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  }
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// The same without clusters.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes, cudaStream_t stream,
            Overlap overlap, const Arguments&... arguments) {
  launch_clusters(kernel, grid, 1, threads, shared_bytes, stream, overlap, arguments...);
}

}  // namespace common
