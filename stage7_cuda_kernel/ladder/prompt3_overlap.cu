// Prompts, step 3: products during the softmax. wgmma is asynchronous: a warpgroup starts it, and waits for it later.
//
// The scores of the next tile are started before V of this one is added (next_tile in ../production/prefill_kernel.cuh,
// and attend, which calls it). Both products are then in flight. The scores end first, and while the warpgroup turns
// them into weights, the tensor cores still have V to multiply.
//
//     warpgroup 1   K Q^T (tile 1), P V (tile 0) | softmax (tile 1)             | K Q^T (tile 2), P V (tile 1) | …
//     warpgroup 2                                | K Q^T (tile 1), P V (tile 0) | softmax (tile 1)             | …
//
// The last tile, which comes first, is added as in step 2: no other product can run meanwhile.
//
// flops and bytes: as step 1.
// measured: 1x8192 534 Tflop/s, 4x2048 444, 16x512 268 on an NVIDIA H200, 2026-11-22
//
// Why it is faster: a tensor core with two products to compute does not wait for a softmax. Where it is not: short
// prompts are hardly more than their diagonal; they are 2 % slower.
#include "prompt_parts.cuh"

namespace stage7 {
namespace {

#if COURSE_WGMMA
struct Rows : PrefillRows<ScalarType::kBFloat16, kPromptDimensions> {
  using PrefillRows::PrefillRows;

  __device__ __forceinline__ void attend(int num_seen) { PrefillRows::attend<false>(num_seen); }
};
#endif

__global__ void __launch_bounds__(PrefillShape<kPromptDimensions>::kThreads, 1)
    attend(const __grid_constant__ PrefillCall call) {
#if COURSE_WGMMA
  prefill_block<ScalarType::kBFloat16, kPromptDimensions, Rows>(call);
#endif
}

}  // namespace

const PromptStep kPromptOverlap = {"3 products beside the softmax", prefill_serves, attend_prompts<attend>};

}  // namespace
