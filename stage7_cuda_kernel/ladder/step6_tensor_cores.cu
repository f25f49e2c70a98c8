// Step 6: tensor cores, and copies that no computation waits for.
//
// The two ideas need each other. The products of a tile of 16 tokens with up to 8 queries are 8 instructions of a warp
// for the scores and 8 for the output (WarpAttention in decode_kernel.cuh: S^T = K Q^T, O^T = V^T P^T), and some 300
// of all kinds together, where step 5 takes 1,700. They read K and V from shared memory; and there the tensor memory
// accelerator (TMA), the copy engine of a multiprocessor, can put them, a page-head of 4 KB with one instruction, while
// the warp computes on an earlier tile (TileRing in tile_ring.cuh). So the bytes in flight do not depend on how many
// registers the arithmetic leaves: 4 warps x 3 tiles x 8 KB = 96 KB for a thread block, two of them on a
// multiprocessor.
//
//     warp 0   tile 0 | tile 4 | tile 8  …     each warp has its own ring of three tiles: it waits for its
//     warp 1   tile 1 | tile 5 | tile 9  …     oldest one, computes, and copies the next one into the same
//     warp 2   tile 2 | tile 6 | tile 10 …     place. Warps synchronize once, at the end.
//     warp 3   tile 3 | tile 7 | tile 11 …
//
// bytes for 32 x 8,192: 1.07 GB, each once. flops: 4.3 G; the tensor cores do 8.6 G, for 4 of 8 columns are padding,
// and could do 190 G in the time that the bytes take.
// measured: 1x8192 20.7 us (35%), 32x8192 256 us (92%), 32xragged 475 us (42%) on an NVIDIA H200, 2026-11-22
//
// Why it is faster: 39 M instructions instead of 222, and copies that are started while others are still in flight. The
// kernel is memory-bound: arithmetic costs no time. Where it is not: all contexts are cut into the same number of
// pieces. In a ragged batch the longest piece sets the kernel's time, and most of the device idles meanwhile; 256 heads
// on 264 places are one round, 300 heads would be two; and the second launch costs as much as in step 4.
#include "../production/decode_kernel.cuh"
#include "splits.cuh"

namespace stage7 {
namespace {

constexpr int kWarps = 4;
constexpr int kStages = 3;
constexpr int kResident = 2;

using Ring = TileRing<ScalarType::kBFloat16, kDimensions, kStages, kWarps>;

// kQueryTiles: tiles of 8 queries.
template <int kQueryTiles>
__global__ void __launch_bounds__(32 * kWarps, kResident) attend(LadderCall call, Splits splits) {
  COURSE_DYNAMIC_SHARED(128, shared);
  __shared__ __align__(8) unsigned char barriers[kWarps * Ring::kBarrierBytes];
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const Piece piece(call, splits);
  if (piece.length == 0) {
    return;
  }
  const int first_tile = piece.begin / kTileTokens;
  const int end_tile = num_tiles_of(piece.end);
  TileRange share{};
  share.sequence = piece.sequence;
  share.kv_head = piece.head;
  share.tile = first_tile;
  share.num_tiles = end_tile - first_tile;
  share.context_length = piece.length;
  share.table_start = call.batch.table_starts[piece.sequence];
  Ring ring(call.pages, call.batch, share, shared + warp * Ring::kBytes, barriers + warp * Ring::kBarrierBytes);
  ring.start();

  const PartialSoftmax<kDimensions> exchange(shared + kWarps * Ring::kBytes, kWarps, splits.num_queries);
  WarpAttention<ScalarType::kBFloat16, kDimensions, kQueryTiles> attention;
  attention.start(call.queries + head_row(call, piece.sequence, piece.head * splits.num_queries), splits.num_queries);
  for (int tile = first_tile + warp; tile < end_tile; tile += kWarps) {
    const int num_tokens = min(kTileTokens, piece.length - tile * kTileTokens);
    ring.wait();
    if (num_tokens < kTileTokens) {
      ring.clear_values_from(num_tokens);
    }
    attention.add_tile(ring.keys(), ring.values(), num_tokens, call.scale);
    ring.release();
  }
#pragma unroll
  for (int t = 0; t < kQueryTiles; ++t) {
    attention.finish(exchange, warp, t, t * 8, splits.num_queries);
  }
  finish_piece(call, splits, piece, exchange, kWarps);
}

constexpr SplitStep kStep = {.groups_together = true,
                             .resident = kResident,
                             .threads = 32 * kWarps,
                             .num_parts = kWarps,
                             .ring_bytes = kWarps * Ring::kBytes,
                             .kernel_for = [](int num_queries) { return num_queries <= 8 ? attend<1> : attend<2>; }};

}  // namespace

const LadderStep kTensorCores = {"6 tensor cores", split_workspace_bytes<kStep>, nullptr, decode_split<kStep>};

}  // namespace
