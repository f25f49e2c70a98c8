// Prompts, the last row: what the stage uses (common/paged/prefill_kernel.cuh; on other chips and for other shapes
// common/paged/ragged_kernel.cuh).
//
// It is step 3 for every group, more sizes of heads and blocks, and float8. It is faster for four things
// (common/paged/KERNELS.md): a third warpgroup does nothing but copy, so that two others with 232 registers a thread
// can have 64 rows each and tiles of 128 tokens; the heads of a group are rows of one thread block, which reads their K
// and V once; the scores of the next tile are started before V of this one is added, so that the tensor cores multiply
// during the softmax; and tiles on the diagonal are as short as what their rows see.
//
// measured: 1x8192 537 Tflop/s, 4x2048 490, 16x512 292 on an NVIDIA H200, 2026-11-23, at 5fcb232
#include "common/paged/attention_launches.h"
#include "prompt_call.cuh"

namespace stage7 {
namespace {

void attend(const Pages& pages, const BatchArrays& batch, const int* query_starts, const void* queries, void* output,
            int num_tokens, void* workspace, cudaStream_t stream) {
  check_prompts(pages, batch);
  common::ragged_attention(pages, batch, query_starts, queries, output, num_tokens, workspace, stream);
}

}  // namespace

const PromptStep kPromptProduction = {
    "production", attend, RowOrder::kSwizzled, false, common::ragged_workspace_bytes, common::plan_ragged};

}  // namespace
