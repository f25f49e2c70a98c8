// The launch of prefill_kernel.cuh.
#include "prefill_attention.h"

#include <algorithm>
#include <cmath>

#include "checks.h"
#include "common/cuda/launch.h"
#include "prefill_kernel.cuh"

namespace stage8 {
namespace {

// Every multiprocessor has one thread block, which takes one task after the other.
template <ScalarType kType, int kHeadDim>
void launch_prefill(const PrefillCall& call, std::int64_t max_work, cudaStream_t stream) {
  const std::int64_t grid = std::min<std::int64_t>(max_work, common::device_limits().num_multiprocessors);
  common::launch(prefill_kernel<kType, kHeadDim>, dim3(static_cast<unsigned>(grid)), PrefillShape<kHeadDim>::kThreads,
                 sizeof(PrefillShared<kType, kHeadDim>), stream, common::Overlap::kNone, call);
}

template <ScalarType kType>
void choose_head_dim(const PrefillCall& call, std::int64_t max_work, cudaStream_t stream) {
  if (call.pages.shape.head_dim == 64) {
    launch_prefill<kType, 64>(call, max_work, stream);
  } else {
    launch_prefill<kType, 128>(call, max_work, stream);
  }
}

}  // namespace

bool prefill_serves(const PageShape& shape) {
  // can_overlap: the kernel was compiled for this chip, which is the one that has wgmma.
  return common::device_limits().compute_capability == 90 && common::can_overlap() &&
         (shape.head_dim == 64 || shape.head_dim == 128) && shape.block_size >= kTileRows;
}

void prefill_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, cudaStream_t stream) {
  const std::int64_t max_work = std::int64_t{workspace.num_tasks} * pages.shape.num_kv_heads;
  COMMON_CHECK(max_work < std::int64_t{1} << 31, "too many tokens for one launch");
  const PrefillCall call{
      .pages = pages,
      .batch = batch,
      .queries = static_cast<const Element*>(queries),
      .output = static_cast<Element*>(output),
      .queue = workspace.queue,
      .tasks = workspace.tasks,
      .scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(pages.shape.head_dim)))};
  if (pages.shape.type == ScalarType::kFloat8) {
    choose_head_dim<ScalarType::kFloat8>(call, max_work, stream);
  } else {
    choose_head_dim<ScalarType::kBFloat16>(call, max_work, stream);
  }
}

}  // namespace
