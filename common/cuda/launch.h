// Kernel launches, which may overlap with the one before, and the two instructions that make this safe. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "common/cuda/device.h"

namespace common {

// Whether this file's kernels were built for the chip at hand, and wait for the launch before. Kernels for older chips
// run on newer ones, translated on the spot, but have no such instruction.
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

// kPrevious: the kernel may begin while the launch before it still runs (programmatic dependent launch; from compute
// capability 9.0 on, without effect before), so it has to call wait_for_previous_launch() before it touches what
// earlier launches read or write. kPreviousWithoutL1: likewise, and all memory of a multiprocessor becomes shared
// memory. The launches of a step that need much of it then follow each other without a pause: the division can change
// only while a multiprocessor is idle. A kernel that moves bytes through L1 loses by it.
enum class Overlap { kNone, kPrevious, kPreviousWithoutL1 };

// Starts kernel<<<grid, threads, shared_bytes, stream>>>(arguments...).
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes, cudaStream_t stream,
            Overlap overlap, Arguments... arguments) {
  if (shared_bytes > 40 * 1024) {  // a kernel gets 48 KB unasked, what it declares itself included
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  }
  if (overlap == Overlap::kPreviousWithoutL1) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap != Overlap::kNone && can_overlap() ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

#ifdef __CUDACC__

// Waits until the launch before this one has finished and its writes are visible.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch start as soon as there is room. It may then start while the launch before this one still runs,
// unless this one has called wait_for_previous_launch first: so what comes next must not touch anything before it
// waits.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace common
