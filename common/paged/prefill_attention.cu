// The launches of the kernels in prefill_kernel.cuh and prefill_float8.cuh.
#include "common/paged/prefill_attention.h"

#include <algorithm>
#include <cstdint>

#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "common/paged/prefill_float8.cuh"
#include "common/paged/prefill_kernel.cuh"

namespace common {
namespace {

// Every multiprocessor has one thread block, which does one task after the other.
template <typename Shared>
void launch(void (*kernel)(PrefillCall), const PrefillCall& call, int num_tasks, common::Overlap overlap,
            cudaStream_t stream) {
  const std::int64_t max_work = std::int64_t{num_tasks} * call.pages.shape.num_kv_heads;
  COMMON_CHECK(max_work < std::int64_t{1} << 31, "too many tokens for one launch");
  const std::int64_t grid = std::min<std::int64_t>(max_work, common::device_limits().num_multiprocessors);
  common::launch(kernel, dim3(static_cast<unsigned>(grid)), Shared::Shape::kThreads, sizeof(Shared), stream, overlap,
                 call);
}

template <int kHeadDim, bool kWindows>
void choose_type(const PrefillCall& call, int num_tasks, common::Overlap overlap, cudaStream_t stream) {
  if constexpr (kHeadDim <= kMaxFloat8PrefillHeadDim) {
    if (call.pages.shape.type == ScalarType::kFloat8) {
      if constexpr (!kWindows) {
        if (call.order != nullptr) {
          return launch<Float8PrefillShared<kHeadDim>>(prefill_float8_kernel<kHeadDim, false, true>, call, num_tasks,
                                                       overlap, stream);
        }
      }
      return launch<Float8PrefillShared<kHeadDim>>(prefill_float8_kernel<kHeadDim, kWindows>, call, num_tasks, overlap,
                                                   stream);
    }
  }
  if constexpr (kHeadDim <= kMaxSharingHeadDim && !kWindows) {
    if (call.order != nullptr) {
      return launch<PrefillShared<kHeadDim>>(prefill_kernel<kHeadDim, false, true>, call, num_tasks, overlap, stream);
    }
  }
  launch<PrefillShared<kHeadDim>>(prefill_kernel<kHeadDim, kWindows>, call, num_tasks, overlap, stream);
}

}  // namespace

void prefill_attention(const Pages& pages, const BatchArrays& batch, const void* queries, const int* order,
                       void* output, const RaggedWorkspace& workspace, bool beside_previous, cudaStream_t stream) {
  const PrefillCall call{.pages = pages,
                         .batch = batch,
                         .queries = static_cast<const Element*>(queries),
                         .output = static_cast<Element*>(output),
                         .queue = workspace.queue,
                         .tasks = workspace.tasks,
                         .partials = workspace.partials,
                         .scale = score_scale(pages.shape.head_dim),
                         .num_queries_per_kv = batch.num_heads / pages.shape.num_kv_heads,
                         .begins_late = beside_previous,
                         .is_merged = workspace.shape.max_places > 0,
                         .order = order};
  const bool begins_early = beside_previous || order != nullptr;
  const common::Overlap overlap = begins_early ? common::Overlap::kPrevious : common::Overlap::kNone;
  with_windows(batch.window, [&](auto windows) {
    if (pages.shape.head_dim == 64) {
      choose_type<64, windows>(call, workspace.shape.max_tasks, overlap, stream);
    } else if (pages.shape.head_dim == 128) {
      choose_type<128, windows>(call, workspace.shape.max_tasks, overlap, stream);
    } else {
      choose_type<256, windows>(call, workspace.shape.max_tasks, overlap, stream);
    }
  });
}

}  // namespace common
