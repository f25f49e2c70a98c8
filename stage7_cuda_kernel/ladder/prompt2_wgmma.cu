// Prompts, step 2: wgmma. Four warps, a warpgroup, multiply 64 rows at once, and the tensor cores fetch K and V out of
// shared memory by themselves (common/cuda/ptx.cuh).
//
// So a warp's registers hold output and scores and nothing else, and its instructions are the softmax. Because wgmma
// reads a page's panels as they lie, K and V need only be copied; a third warpgroup copies them (PrefillProducer), as
// far ahead as the rings have room. The two warpgroups that compute take turns: one starts its products, then lets the
// other one start, and computes its softmax meanwhile.
//
// Here a warpgroup waits for each product at once: scores, softmax, then V, tile by tile.
//
//     warpgroup 1   K Q^T | softmax        | P V  | K Q^T | softmax
//     warpgroup 2         | K Q^T | softmax       | P V   | K Q^T | softmax
//
// flops and bytes: as step 1.
// measured: 1x8192 472 Tflop/s, 4x2048 441, 16x512 275 on an NVIDIA H200, 2026-11-22
//
// Why it is faster: no instruction fetches an operand. Where it is still slow: the tensor cores idle whenever both
// warpgroups compute their softmax, and a tile of 128 tokens on the diagonal is computed whole, though half of it is
// masked.
#include "prompt_parts.cuh"

namespace stage7 {
namespace {

#if COURSE_WGMMA
struct Rows : PrefillRows<ScalarType::kBFloat16, kPromptDimensions> {
  using PrefillRows::PrefillRows;

  // Copies the tiles from the last to the first.
  __device__ __forceinline__ void attend(int num_seen) {
    for (int tile = (num_seen - 1) / kTokens; tile >= 0; --tile) {
      add_last_tile<kTokens>(tile, min(num_seen - tile * kTokens, kTokens));
    }
  }
};
#endif

__global__ void __launch_bounds__(PrefillShape<kPromptDimensions>::kThreads, 1)
    attend(const __grid_constant__ PrefillCall call) {
#if COURSE_WGMMA
  prefill_block<ScalarType::kBFloat16, kPromptDimensions, Rows>(call);
#endif
}

}  // namespace

const PromptStep kPromptWgmma = {"2 wgmma", prefill_serves, attend_prompts<attend>};

}  // namespace
