// Step 5: the group reads together. One thread block walks a kv head for all query heads that share it.
//
// Stage 4's idea, and what grouped-query attention is for: K and V of a token are loaded once, and every query of the
// group uses them while they are in registers. A thread keeps 8 dimensions of each query and of each output.
//
// bytes for 32 x 8,192: each byte of K and V is asked for once, 1.07 GB in place of 4.3. flops: 4.3 G, 4 a byte; but on
// plain arithmetic units, where a score also costs four exchanges between threads. A group of 4 takes 845 instructions
// of a warp for 8 tokens, 222 M in all, of 132 x 4 that the device starts in each of 1.8 G cycles a second: 235 us,
// just what the bytes take. Neither hides the other completely.
// measured: 1x8192 28.3 us (26%), 32x8192 328 us (71%), 32xragged 830 us (24%) on an NVIDIA H200, 2026-11-21
//
// Why it is faster: 26 instructions a token and query head in place of 49. Not because of the bytes: L1 had caught the
// repeated reads. Where it is not: one sequence, which has 8 heads to give out and no longer 32. Its context is cut
// into twice as many pieces, and the merge of 64 takes 20 us when it is timed alone. Without groups (MHA) it
// is step 4. And groups of 8 and 16 need as many queries in registers: 240 and 255 a thread, with 264 bytes that do not
// even fit, so few warps are there to hide each other's waiting; arithmetic grows with the group although the bytes do
// not.
#include "online_softmax.cuh"
#include "splits.cuh"

namespace stage7 {
namespace {

// kQueries: the group, rounded up to a power of 2; the queries past its end repeat the last one.
template <int kQueries>
__global__ void __launch_bounds__(kThreads) attend(LadderCall call, Splits splits) {
  constexpr int kUnroll = kQueries <= 4 ? 4 : kQueries == 8 ? 2 : 1;  // what the registers have room for
  extern __shared__ __align__(16) unsigned char shared[];
  const auto kv_head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto split = static_cast<int>(blockIdx.z);
  const auto thread = static_cast<int>(threadIdx.x);
  const int length = call.batch.context_lengths[sequence];
  if (length == 0) {
    return;
  }
  const int group = splits.num_queries;
  const HeadPages head(call, sequence, kv_head);
  ElementVec queries[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    const std::int64_t row = head_row(call, sequence, kv_head * group + min(i, group - 1));
    queries[i] = load_vec(call.queries + row + thread % kVecsPerRow * kVecElements);
  }
  HalfWarpRow own[kQueries];
  const BlockRange range(length, split, splits.count);
  attend_range<kQueries, kUnroll>(head, queries, call.scale, range.begin * kBlockTokens,
                                  min(range.end * kBlockTokens, length), own);

  const PartialSoftmax<kDimensions> exchange(shared, kHalfWarps, group);
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    if (i < group) {
      own[i].store(exchange, thread / kVecsPerRow, i);
    }
  }
  finish_split(call, splits, exchange, kHalfWarps, sequence, kv_head, split);
}

Splits splits_of(const PageShape& shape, const Batch& batch, void* workspace) {
  constexpr int kResident = 4;
  return choose_splits(shape, batch, shape.num_kv_heads, kResident, workspace);
}

std::size_t workspace_bytes(const PageShape& shape, const Batch& batch) {
  return splits_of(shape, batch, nullptr).bytes(batch.num_sequences);
}

auto* kernel_for(int group) {
  return group == 1 ? attend<1> : group == 2 ? attend<2> : group <= 4 ? attend<4> : group <= 8 ? attend<8> : attend<16>;
}

void decode(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  const Splits splits = splits_of(pages.shape, batch, workspace);
  if (batch.num_sequences > 0) {
    common::launch(kernel_for(splits.num_queries), grid_of(splits.num_heads, batch.num_sequences, splits.count),
                   kThreads, PartialSoftmax<kDimensions>::bytes(kHalfWarps, splits.num_queries), stream,
                   common::Overlap::kNone, call, splits);
    merge_splits(call, splits, stream);
  }
}

}  // namespace

const LadderStep kGroup = {"5 group together", workspace_bytes, nullptr, decode};

}  // namespace
