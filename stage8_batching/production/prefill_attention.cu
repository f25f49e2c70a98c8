// The launches of prefill_kernel.cuh's kernels.
#include "prefill_attention.h"

#include "prefill_launch.cuh"

namespace stage8 {
namespace {

template <ScalarType kType>
void choose_head_dim(const PrefillCall& call, int num_tasks, cudaStream_t stream) {
  if (call.pages.shape.head_dim == 64) {
    launch_prefill<kType, 64>(prefill_kernel<kType, 64>, call, num_tasks, stream);
  } else {
    launch_prefill<kType, 128>(prefill_kernel<kType, 128>, call, num_tasks, stream);
  }
}

}  // namespace

bool prefill_serves(const PageShape& shape) {
  // can_overlap: the kernel was compiled for this chip, the only one that has wgmma.
  return common::device_limits().compute_capability == 90 && common::can_overlap() &&
         (shape.head_dim == 64 || shape.head_dim == 128) && shape.block_size >= kTileRows;
}

void prefill_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, cudaStream_t stream) {
  const PrefillCall call = prefill_call(pages, batch, queries, output, workspace);
  if (pages.shape.type == ScalarType::kFloat8) {
    choose_head_dim<ScalarType::kFloat8>(call, workspace.num_tasks, stream);
  } else {
    choose_head_dim<ScalarType::kBFloat16>(call, workspace.num_tasks, stream);
  }
}

}  // namespace
