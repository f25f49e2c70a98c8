// Step 3: one pass. The online softmax of stage 3 keeps scores and weights in registers.
//
// K and V of a token are read together, and nothing is written but the output. Each half-warp runs its own online
// softmax over every eighth token (half_warps.cuh), and the eight results are joined at the end in shared memory,
// as stage 3 joins blocks: bring both sides to the larger maximum, then add.
//
// bytes for 32 x 8,192: still 4.3 GB loaded, since each query head reads the K and V of its group; the scores are
// gone, and so is the workspace. flops: 4.3 G, and a few more for rescaling.
// measured: 1x8192 256 us (3%), 32x8192 605 us (39%), 32xragged 1,058 us (19%) on an NVIDIA H200, 2026-11-22
//
// Why it is faster: twice the loads in flight, because V does not wait for all of K; no barrier between passes; 49
// instructions for a token and query head instead of 62. Without groups (MHA) a large batch is read at the ceiling
// from here on, and no later step is faster. With groups the four heads find each other's K and V in L1 (1.2 GB go
// through L2, 1.1 come from memory), but each of them unpacks and multiplies for itself: 412 M instructions, 433 us at
// the least. And with one sequence of 1,024 tokens there are 32 thread blocks for 132 multiprocessors, in this step as
// in the steps before: three of four are idle.
#include "half_warps.cuh"

namespace stage7 {
namespace {

// The 8: registers for eight thread blocks on a multiprocessor, enough for K and V of four tokens. By default the
// compiler uses fewer registers, and not all of a thread's loads are in flight at once.
__global__ void __launch_bounds__(kThreads, 8) attend(LadderCall call) {
  COURSE_DYNAMIC_SHARED(16, shared);
  const auto query_head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto thread = static_cast<int>(threadIdx.x);
  const int length = call.batch.context_lengths[sequence];
  if (length == 0) {
    return;
  }
  const HeadPages head(call, sequence, query_head / (call.batch.num_heads / call.pages.shape.num_kv_heads));
  const std::int64_t row = head_row(call, sequence, query_head);
  const ElementVec query[] = {load_vec(call.queries + row + thread % kVecsPerRow * kVecElements)};
  HalfWarpRow own[1];
  attend_range<1, 4>(head, query, call.scale, 0, length, own);

  const PartialSoftmax<kDimensions> exchange(shared, kHalfWarps, 1);
  store_half_warp(own[0], exchange, 0);
  __syncthreads();
  if (thread < 32) {
    write_output(call, exchange, kHalfWarps, 0, row);
  }
}

void decode(const Pages& pages, const Batch& batch, const void* queries, void* output, void* /*workspace*/,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (batch.num_sequences > 0) {
    common::launch(attend, grid_of(batch.num_heads, batch.num_sequences), kThreads,
                   PartialSoftmax<kDimensions>::bytes(kHalfWarps, 1), stream, common::Overlap::kNone, call);
  }
}

std::size_t workspace_bytes(const PageShape& shape, const Batch& batch) {
  check_ladder(shape, batch);
  return 0;
}

}  // namespace

const LadderStep kOnlineSoftmax = {"3 online softmax", workspace_bytes, nullptr, decode};

}  // namespace
