// The last row: the kernel that the stage uses in bfloat16 and float8 (common/paged/decode_kernel.cuh).
//
// It is step 7 for every group up to 16, head_dim from 32 to 256, blocks of 8 to 64 tokens and pages of float8, and
// also stores the new token's K and V in their slots, which saves a layer one launch. Three further things make it
// faster (common/paged/KERNELS.md): shares end where heads end, if the longest share then has only a few tiles more;
// the plan has what a share needs for its first copy in one record; and the merge loads several partial results at
// once.
//
// bytes for 32 x 8,192: 1.07 GB, each once, and at most two partial results of 2 KB (a group of 4) for each thread
// block: 1 MB. flops: 4.3 G.
// measured: 1x8192 12.8 us (57%), 32x8192 249 us (94%), 32xragged 222 us (90%) on an NVIDIA H200, 2026-11-23, at
// 5fcb232
#include "common/paged/attention_launches.h"
#include "ladder_call.cuh"

namespace stage7 {
namespace {

std::size_t workspace_bytes(const PageShape& shape, const BatchArrays& batch) {
  check_ladder(shape, batch);
  return common::decode_workspace_bytes(shape, batch);
}

void plan(const PageShape& shape, const BatchArrays& batch, void* workspace, cudaStream_t stream) {
  common::plan_decode(shape, batch, workspace, stream);
}

void decode(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  check_ladder(pages.shape, batch);
  common::decode_attention(pages, batch, queries, output, workspace, stream, {.overlap_previous = true});
}

}  // namespace

const LadderStep kProduction = {"production", workspace_bytes, plan, decode, RowOrder::kSwizzled};

}  // namespace
