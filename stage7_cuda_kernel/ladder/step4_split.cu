// Step 4: split the context. Several thread blocks share one head's tokens, and a second launch joins their
// results.
//
// Decoding has one query a sequence, so steps 1 to 3 have sequences x heads thread blocks: 32 for a single sequence,
// and there are 132 multiprocessors with room for 8 each. Cutting the context gives as many as the device can hold
// ("Flash-Decoding", https://pytorch.org/blog/flash-decoding/). The price is the partial results, 536 bytes for each
// piece and query head, written and read once more, and a launch that cannot begin before the last piece is done.
//
// bytes for 32 x 8,192: 4.3 GB loaded, as before. There are 1,024 heads already, so nothing is cut (splits.cuh). For
// 1 x 8,192 a context is cut into 33 pieces of 248 tokens: 34 MB of K and V, each loaded four times, and 0.6 MB of
// partial results. flops: 4.3 G; merging adds 2 for each number of a partial result.
// measured: 1x8192 31.0 us (24%), 32x8192 609 us (39%), 32xragged 1,089 us (18%) on an NVIDIA H200, 2026-11-22
//
// Why it is faster: a single sequence has the whole device. Where it is not: a batch that fills the device anyway. And
// the second launch is not free: on its own it takes 5 us for 1,024 tokens, and 12 where a warp joins 33 pieces, half
// as long as the walk itself.
#include "half_warps.cuh"
#include "splits.cuh"

namespace stage7 {
namespace {

constexpr int kResident = 8;

__global__ void __launch_bounds__(kThreads, kResident) attend(LadderCall call, Splits splits) {
  COURSE_DYNAMIC_SHARED(16, shared);
  const Piece piece(call, splits);
  if (piece.length == 0) {
    return;
  }
  const HeadPages head(call, piece.sequence, piece.head / (call.batch.num_heads / call.pages.shape.num_kv_heads));
  const ElementVec query[] = {load_vec(call.queries + head_row(call, piece.sequence, piece.head) +
                                       static_cast<int>(threadIdx.x) % kVecsPerRow * kVecElements)};
  HalfWarpRow own[1];
  attend_range<1, 4>(head, query, call.scale, piece.begin, piece.end, own);

  const PartialSoftmax<kDimensions> exchange(shared, kHalfWarps, 1);
  store_half_warp(own[0], exchange, 0);
  finish_piece(call, splits, piece, exchange, kHalfWarps);
}

// A warp for each query. Its loads do not wait for each other, but all of them wait for the launch before.
__global__ void merge(LadderCall call, Splits splits) {
  const auto head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto query = static_cast<int>(threadIdx.x) / 32;
  if (call.batch.context_lengths[sequence] > 0) {
    write_output(call, splits.results(sequence, head), splits.count, query,
                 head_row(call, sequence, head * splits.num_queries + query));
  }
}

constexpr SplitStep kStep = {.groups_together = false,
                             .resident = kResident,
                             .threads = kThreads,
                             .num_parts = kHalfWarps,
                             .ring_bytes = 0,
                             .kernel_for = [](int) { return attend; }};

}  // namespace

void merge_splits(const LadderCall& call, const Splits& splits, cudaStream_t stream) {
  if (splits.count > 1) {
    common::launch(merge, grid_of(splits.num_heads, call.batch.num_sequences), 32 * splits.num_queries, 0, stream,
                   common::Overlap::kNone, call, splits);
  }
}

const LadderStep kSplit = {"4 split contexts", split_workspace_bytes<kStep>, nullptr, decode_split<kStep>};

}  // namespace
