// Step 5: the group reads together. One thread block walks a kv head for all query heads that share it.
//
// It is stage 4's idea, and the purpose of grouped-query attention: K and V of a token are loaded once, and every query
// of the group uses them while they are in registers. A thread keeps 8 dimensions of each query and of each output.
//
// bytes for 32 x 8,192: each byte of K and V is loaded once, 1.07 GB in place of 4.3. flops: 4.3 G, 4 for a byte; but
// on plain arithmetic units, where a score also costs four exchanges between threads. A group of 4 takes 845
// instructions of a warp for 8 tokens, 222 M in all, of 132 x 4 that the device starts in each of 1.8 G cycles a
// second: 234 us, just what the bytes take. Neither hides the other completely. measured: 1x8192 29.5 us (25%), 32x8192
// 329 us (72%), 32xragged 849 us (24%) on an NVIDIA H200, 2026-11-22
//
// Why it is faster: 26 instructions for a token and query head in place of 49. Not because of the bytes: L1 had caught
// the repeated reads. Where it is not: one sequence, which has 8 heads to share out in place of 32. Its context is cut
// into twice as many pieces, and the merge of 64 takes 20 us when it is timed alone. Without groups (MHA) it
// is step 4. And groups of 8 and 16 need as many queries in registers: 242 and 255 registers for a thread, with 292
// bytes that do not even fit, so few warps are there to hide each other's waiting; arithmetic grows with the group
// although the bytes do not.
#include "half_warps.cuh"
#include "splits.cuh"

namespace stage7 {
namespace {

// kQueries: the group, rounded up to a power of 2; the queries past its end repeat the last one.
template <int kQueries>
__global__ void __launch_bounds__(kThreads) attend(LadderCall call, Splits splits) {
  constexpr int kUnroll = kQueries <= 4 ? 4 : kQueries == 8 ? 2 : 1;  // tokens that fit into the registers
  extern __shared__ __align__(16) unsigned char shared[];
  const Piece piece(call, splits);
  if (piece.length == 0) {
    return;
  }
  const int group = splits.num_queries;
  const HeadPages head(call, piece.sequence, piece.head);
  ElementVec queries[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    const std::int64_t row = head_row(call, piece.sequence, piece.head * group + min(i, group - 1));
    queries[i] = load_vec(call.queries + row + static_cast<int>(threadIdx.x) % kVecsPerRow * kVecElements);
  }
  HalfWarpRow own[kQueries];
  attend_range<kQueries, kUnroll>(head, queries, call.scale, piece.begin, piece.end, own);

  const PartialSoftmax<kDimensions> exchange(shared, kHalfWarps, group);
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    if (i < group) {
      store_half_warp(own[i], exchange, i);
    }
  }
  finish_piece(call, splits, piece, exchange, kHalfWarps);
}

void (*kernel_for(int group))(LadderCall, Splits) {
  return group == 1 ? attend<1> : group == 2 ? attend<2> : group <= 4 ? attend<4> : group <= 8 ? attend<8> : attend<16>;
}

constexpr SplitStep kStep = {.groups_together = true,
                             .resident = 4,
                             .threads = kThreads,
                             .num_parts = kHalfWarps,
                             .ring_bytes = 0,
                             .kernel_for = kernel_for};

}  // namespace

const LadderStep kGroup = {"5 group together", split_workspace_bytes<kStep>, nullptr, decode_split<kStep>};

}  // namespace
