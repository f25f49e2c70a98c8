// Step 6: tensor cores, and copies that no computation waits for.
//
// Two ideas that need each other. The products of a tile of 16 tokens with up to 8 queries are 8 instructions of a warp
// for the scores and 8 for the output (WarpAttention in decode_kernel.cuh: S^T = K Q^T, O^T = V^T P^T), and some 300
// of all kinds together, where step 5 takes 1,700. They read K and V from shared memory; and there the tensor memory
// accelerator (TMA), the copy engine of a multiprocessor, can put them, a page-head of 4 KB an instruction, while the
// warp computes on an earlier tile (TileRing in tile_ring.cuh). So the loads under way no longer depend on how many
// registers the arithmetic leaves: 4 warps x 3 tiles x 8 KB = 96 KB a thread block, two of them on a multiprocessor.
//
//     warp 0   tile 0 | tile 4 | tile 8  …     each warp has its own ring of three tiles: it waits for its
//     warp 1   tile 1 | tile 5 | tile 9  …     oldest one, computes, and copies the next one into the same
//     warp 2   tile 2 | tile 6 | tile 10 …     place. Warps meet once, at the end.
//     warp 3   tile 3 | tile 7 | tile 11 …
//
// bytes for 32 x 8,192: 1.07 GB, each once. flops: 4.3 G; the tensor cores do 8.6 G, for 4 of 8 columns are padding,
// and could do 190 G in the time that the bytes take.
// measured: 1x8192 20.1 us (36%), 32x8192 257 us (91%), 32xragged 489 us (41%) on an NVIDIA H200, 2026-11-21
//
// Why it is faster: 40 M instructions in place of 222, and copies that are started while others are still on their way.
// Arithmetic has left the picture, and what remains is a memory copy. Where it is not: all contexts are cut into
// equally many pieces. In a ragged batch the longest one is then the whole kernel's time while most of the device is
// done; 256 heads on 264 places are one round, 300 heads would be two; and the second launch costs what it cost in step
// 4.
#include "../kernels/decode_kernel.cuh"
#include "splits.cuh"

namespace stage7 {
namespace {

constexpr int kWarps = 4;
constexpr int kStages = 3;
constexpr int kResident = 2;

using Ring = TileRing<kDimensions, kStages, kWarps>;

// kQueryTiles: of 8 queries.
template <int kQueryTiles>
__global__ void __launch_bounds__(32 * kWarps, kResident) attend(LadderCall call, Splits splits) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) unsigned char barriers[kWarps * Ring::kBarrierBytes];
  const auto kv_head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto split = static_cast<int>(blockIdx.z);
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const int length = call.batch.context_lengths[sequence];
  if (length == 0) {
    return;
  }
  const BlockRange range(length, split, splits.count);
  TileRange share{};
  share.sequence = sequence;
  share.kv_head = kv_head;
  share.tile = range.begin;
  share.num_tiles = range.end - range.begin;
  share.context_length = length;
  Ring ring(call.pages, call.batch, share, shared + warp * Ring::kBytes, barriers + warp * Ring::kBarrierBytes);
  ring.start();

  const PartialSoftmax<kDimensions> exchange(shared + kWarps * Ring::kBytes, kWarps, splits.num_queries);
  WarpAttention<kDimensions, kQueryTiles> attention;
  attention.start(call.queries + head_row(call, sequence, kv_head * splits.num_queries), splits.num_queries);
  for (int tile = range.begin + warp; tile < range.end; tile += kWarps) {
    const int num_tokens = min(kTileTokens, length - tile * kTileTokens);
    ring.wait();
    if (num_tokens < kTileTokens) {
      ring.clear_values_from(num_tokens);
    }
    attention.add_tile(ring.keys(), ring.values(), num_tokens, call.scale);
    ring.release();
  }
  attention.finish(exchange, warp);
  finish_split(call, splits, exchange, kWarps, sequence, kv_head, split);
}

Splits splits_of(const PageShape& shape, const Batch& batch, void* workspace) {
  return choose_splits(shape, batch, shape.num_kv_heads, kResident, workspace);
}

std::size_t workspace_bytes(const PageShape& shape, const Batch& batch) {
  return splits_of(shape, batch, nullptr).bytes(batch.num_sequences);
}

void decode(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  const Splits splits = splits_of(pages.shape, batch, workspace);
  if (batch.num_sequences > 0) {
    common::launch(splits.num_queries <= 8 ? attend<1> : attend<2>,
                   grid_of(splits.num_heads, batch.num_sequences, splits.count), 32 * kWarps,
                   kWarps * Ring::kBytes + PartialSoftmax<kDimensions>::bytes(kWarps, splits.num_queries), stream,
                   common::Overlap::kNone, call, splits);
    merge_splits(call, splits, stream);
  }
}

}  // namespace

const LadderStep kTensorCores = {"6 tensor cores", workspace_bytes, nullptr, decode};

}  // namespace
