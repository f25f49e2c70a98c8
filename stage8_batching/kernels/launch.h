// What the launching functions of all kernels share: argument checks, the choice of template arguments, and launches
// that may overlap with the one before.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/base/check.h"
#include "common/cuda/device.h"
#include "common/cuda/launch.h"
#include "kernels.h"

namespace stage8 {

inline bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

inline void check_shape(const PageShape& shape, int num_heads) {
  COMMON_CHECK(shape.num_blocks > 0, "pages have blocks");
  const std::string reason = unsupported(shape, num_heads);
  COMMON_CHECK(reason.empty(), reason);
}

inline void check_pages(const Pages& pages) {
  check_shape(pages.shape, pages.shape.num_kv_heads);
  COMMON_CHECK(pages.keys != nullptr && pages.values != nullptr, "pages have keys and values");
  COMMON_CHECK(is_aligned(pages.keys) && is_aligned(pages.values), "pages begin at multiples of 16 bytes");
}

inline void check_batch(const PageShape& shape, const Batch& batch) {
  COMMON_CHECK(batch.num_sequences >= 0, "a batch has no sequences or some");
  check_shape(shape, batch.num_heads);
  COMMON_CHECK(batch.num_sequences == 0 || (batch.context_lengths != nullptr && batch.block_tables != nullptr),
               "a batch has lengths and tables");
  COMMON_CHECK(batch.max_blocks_per_sequence > 0, "block tables have entries");
}

// Starts kernel<<<grid, threads, shared_bytes, stream>>>(arguments...). overlap: it may begin while the launch before
// still runs (programmatic dependent launch; from compute capability 9.0 on, without effect before).
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes, cudaStream_t stream,
            bool overlap, Arguments... arguments) {
  if (shared_bytes > 40 * 1024) {  // a kernel gets 48 KB unasked, what it declares itself included
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
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
  config.numAttrs = overlap && common::can_overlap() ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace
