// The launch of a kernel with the structure of prefill_kernel.cuh.
#pragma once

#include <algorithm>
#include <cmath>

#include "../kernels/checks.h"
#include "common/cuda/runtime/launch.h"
#include "prefill_kernel.cuh"

namespace stage7 {

inline PrefillCall prefill_call(const Pages& pages, const Batch& batch, const void* queries, void* output,
                                const RaggedWorkspace& workspace) {
  return {.pages = pages,
          .batch = batch,
          .queries = static_cast<const Element*>(queries),
          .output = static_cast<Element*>(output),
          .queue = workspace.queue,
          .tasks = workspace.tasks,
          .scale = score_scale(pages.shape.head_dim)};
}

// Every multiprocessor has one thread block, which does one task after the other.
template <ScalarType kType, int kHeadDim>
void launch_prefill(void (*kernel)(PrefillCall), const PrefillCall& call, int num_tasks, cudaStream_t stream) {
  const std::int64_t max_work = std::int64_t{num_tasks} * call.pages.shape.num_kv_heads;
  COMMON_CHECK(max_work < std::int64_t{1} << 31, "too many tokens for one launch");
  const std::int64_t grid = std::min<std::int64_t>(max_work, common::device_limits().num_multiprocessors);
  common::launch(kernel, dim3(static_cast<unsigned>(grid)), PrefillShape<kHeadDim>::kThreads,
                 sizeof(PrefillShared<kType, kHeadDim>), stream, common::Overlap::kNone, call);
}

}  // namespace
