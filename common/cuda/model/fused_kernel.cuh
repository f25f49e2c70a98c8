// A decode step reads every weight once for one token, or for a few: 2 operations a weight and token, where the chip
// could do 300 in the time that the weight takes to arrive. So the kernel must keep memory busy, also between the
// hundreds of launches of a step:
//
// - Weights do not depend on the previous launch. A thread block starts copying as much of its share as fits into a
//   ring in shared memory, and only then waits for the previous launch to finish.
// - The ring has 192 KB: a multiprocessor has room for nothing else. With half of that, two launches fit side by side
//   and the second could start even earlier, but a step of Llama-3.2-1B took 914 us and not 826 (H200): what the first
//   still has to load waits behind the second's weights, and where a multiprocessor has room for two, two blocks of one
//   launch land on some and none on others. Only where 64 KB hold a block's whole share, the ring has no more: all
//   blocks can begin while attention still occupies some multiprocessors (with one sequence 1,255 tokens/s became
//   1,269, with 8 sequences 9,202 became 9,406).
// - Each block takes tiles of 8 rows of the weights, which lie next to each other in memory. The warps of a block
//   share the columns out: each multiplies its columns of the 8 rows, and their sums are added up at the end.
// - A thread copies into the ring what it will itself read from there, 16 bytes at a time: no barriers in the loop.
// - The norm costs no pass of its own: its scale is one number for each token, applied to the finished sums. So is
//   float8's scale of a row.
// - Float8 weights are unpacked in registers, two tiles at a time (multiply_float8), by 16 warps where there is room.
//
// In the order of the kernel, which comes last: which tiles a block has, the ring of weights, x in registers, the
// product of a tile, and the sums of a group of tiles.
#pragma once

#include "common/cuda/model/fused_pieces.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"

namespace common {

// The tiles of 8 rows that a thread block has.
struct TileSpan {
  int first;
  int count;
};

__device__ __forceinline__ TileSpan tiles_of_block(const FusedLinear& linear) {
  const int total = (linear.num_rows + kTileRows - 1) / kTileRows;
  const auto first_of = [&](unsigned block) { return static_cast<int>(std::int64_t{block} * total / gridDim.x); };
  const int first = first_of(blockIdx.x);
  return {first, first_of(blockIdx.x + 1) - first};
}

// The column where a thread's first slot of a batch begins; its other slots are kColumnsOfSlot apart.
template <typename Shape, int kSlots>
__device__ __forceinline__ int first_column(int batch) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return (batch * kSlots * Shape::kWarps + warp) * Shape::kPieceColumns + lane % 4 * Shape::kColumns;
}

// The copies of weights into shared memory. A visit is a batch of columns of a tile, or of two tiles in float8; the
// ring holds kStages visits, and a thread fills and reads its own 16 bytes of each slot.
template <typename Shape, int kSlots, int kStages>
class WeightRing {
 public:
  // ring: [kStages][kVisitTiles][kSlots][kThreads]
  __device__ __forceinline__ WeightRing(const FusedLinear& linear, TileSpan tiles, int num_batches, uint4* ring)
      : linear_(linear), tiles_(tiles), num_batches_(num_batches), ring_(ring + threadIdx.x) {}

  // Starts the copies of the first kStages visits.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      copy_next(stage);
    }
  }

  // Waits for the oldest visit, which slot() reads.
  __device__ __forceinline__ void wait() const { wait_copies<kStages - 1>(); }
  __device__ __forceinline__ const uint4& slot(int slot, int tile = 0) const { return *place(stage_, tile, slot); }

  // Releases the oldest visit: the next visit not yet copied gets its place.
  __device__ __forceinline__ void release() {
    copy_next(stage_);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  // One visit is one group of copies, even if there is nothing left to copy: so wait() can count groups.
  __device__ __forceinline__ void copy_next(int stage) {
    using Weight = typename Shape::Weight;
    constexpr int kStride = Shape::kColumnsOfSlot;
    if (ahead_.tile < tiles_.count) {
      const int column = first_column<Shape, kSlots>(ahead_.batch);
#pragma unroll
      for (int tile = 0; tile < Shape::kVisitTiles; ++tile) {
        const int row = (tiles_.first + ahead_.tile + tile) * kTileRows + static_cast<int>(threadIdx.x) % 32 / 4;
        const bool exists = row < linear_.num_rows && (tile == 0 || ahead_.tile + tile < tiles_.count);
        const int num_columns = exists ? linear_.num_cols - column : 0;
        const Weight* source =
            static_cast<const Weight*>(linear_.weights) + std::int64_t{row} * linear_.num_cols + column;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          copy_async(place(stage, tile, slot), source + slot * kStride, slot * kStride < num_columns);
        }
      }
      ahead_.advance(tiles_.count, num_batches_);
    }
    commit_copies();
  }

  __device__ __forceinline__ uint4* place(int stage, int tile, int slot) const {
    return ring_ + ((stage * Shape::kVisitTiles + tile) * kSlots + slot) * Shape::kThreads;
  }

  const FusedLinear& linear_;
  const TileSpan tiles_;
  const int num_batches_;
  uint4* const ring_;  // this thread's first slot
  Visit<Shape> ahead_;
  int stage_ = 0;  // where the oldest visit lies
};

// A thread's part of x, in registers: a batch of columns of one token in each eight tokens.
template <typename Shape, int kSlots>
class Activations {
 public:
  using Scalar = typename Shape::Scalar;
  static constexpr int kEights = Shape::kEights;
  static constexpr int kPieces = static_cast<int>(sizeof(Scalar) / sizeof(typename Shape::Weight));  // for 16 bytes
  using Batch = uint4[kSlots][kPieces][kEights];

  __device__ __forceinline__ explicit Activations(const FusedLinear& linear)
      : linear_(linear), zero_(linear.num_cols < 0 ? 1 : 0) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      rows_[i] = row_of_x(linear, sizeof(Scalar) == 2 ? 8 * i + static_cast<int>(threadIdx.x) % 32 / 4 : 0);
    }
  }

  // As it lies in memory; before it is multiplied, it must be interleaved.
  __device__ __forceinline__ void load(int batch, Batch& x) const {
    constexpr int kStride = Shape::kColumnsOfSlot;
    const int column = first_column<Shape, kSlots>(batch);
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const Scalar* source =
          static_cast<const Scalar*>(linear_.x) + std::int64_t{max(rows_[i], 0)} * linear_.num_cols + column;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int ahead = slot * kStride + piece * kColumns;
          const bool exists = rows_[i] >= 0 && column + ahead < linear_.num_cols;
          x[slot][piece][i] = exists ? load_x_piece(source + ahead) : uint4{};
        }
      }
    }
  }

  __device__ __forceinline__ void interleave_all(Batch& x) const {
    if constexpr (Shape::kTokens > 8 && !Shape::kFloat8) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int i = 0; i < kEights; i += 2) {
          interleave(x[slot][0][i], x[slot][0][i + 1], zero_);
        }
      }
    }
  }

 private:
  static constexpr int kColumns = 16 / static_cast<int>(sizeof(Scalar));

  const FusedLinear& linear_;
  const unsigned zero_;  // which the compiler does not know: see interleave()
  int rows_[kEights];
};

// A warp's columns of a tile, times x: sums for the tile's 8 rows and all tokens, set or added to. In float8,
// the columns of two tiles.
template <typename Shape, int kSlots, int kPieces, typename Ring>
__device__ __forceinline__ void multiply_tile(const uint4 (&x)[kSlots][kPieces][Shape::kEights], const Ring& weights,
                                              float2* sums, bool add) {
  using Scalar = typename Shape::Scalar;
  constexpr int kTokens = Shape::kTokens;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (Shape::kFloat8) {
    float products[2][Shape::kEights][4] = {};
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      multiply_float8(products, weights.slot(slot, 0), weights.slot(slot, 1), x[slot]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      constexpr int kPairsOfTile = Shape::kWarps * Shape::kPairs;
      store_float8(reinterpret_cast<float*>(sums + tile * kPairsOfTile), lane, products[0], products[1], tile, add);
    }
  } else if constexpr (kTokens == 8) {
    float even[2] = {};
    float odd[2] = {};
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      multiply(even, odd, x[slot][0][0], weights.slot(slot), Scalar{});
    }
    store_partial(sums, lane, even, odd, add, Scalar{});
  } else {
    float products[kTokens / 16][2][4] = {};
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const uint4 w = weights.slot(slot);
#pragma unroll
      for (int j = 0; j < kTokens / 16; ++j) {
        multiply_full(products[j][0], x[slot][0][2 * j], w.x, w.y);
        multiply_full(products[j][1], x[slot][0][2 * j + 1], w.z, w.w);
      }
    }
#pragma unroll
    for (int j = 0; j < kTokens / 16; ++j) {
      const float(&first)[4] = products[j][0];
      const float(&second)[4] = products[j][1];
      float2* destination = sums + 64 * j + lane;
      store_sums(destination, first[0] + second[0], first[1] + second[1], add);
      store_sums(destination + 32, first[2] + second[2], first[3] + second[3], add);
    }
  }
}

// The two sums that a thread finishes in one pass over a group: one token's, for two rows of the product.
template <typename Shape>
struct SumPair {
  int tile;  // of the group
  int pair;  // of the tile
  int token;
  int row;      // and the next one
  bool exists;  // in the product: a tile may have rows past its end, and tokens that the step has not

  __device__ __forceinline__ SumPair(const FusedLinear& linear, TileSpan tiles, int group, int pass) {
    const int index = pass * Shape::kThreads + static_cast<int>(threadIdx.x);
    tile = index / Shape::kPairs;
    pair = index % Shape::kPairs;
    token = pair / 4;
    row = (tiles.first + group + tile) * kTileRows + static_cast<int>(threadIdx.x) % 4 * 2;
    exists = tile < Shape::kGroup && group + tile < tiles.count && token < linear.num_tokens && row < linear.num_rows;
  }
};

// The exchange of the warps' sums of a group of tiles, and the norm's scale of each token, in shared memory.
template <typename Shape>
struct GroupSums {
  float2 of_warps[Shape::kGroup][Shape::kWarps][Shape::kPairs];
  float scales[Shape::kTokens];

  // Each warp finds the scales of its share of the tokens.
  __device__ __forceinline__ void set_scales(const FusedLinear& linear) {
    constexpr int kEights = Shape::kEights;
    constexpr int kLanes = 32 / kEights;  // for each token's scale
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_token = static_cast<int>(threadIdx.x) / 32 * kEights;
    if (first_token < linear.num_tokens) {
      const int token = first_token + lane / kLanes;
      const float scale = norm_scale<kLanes>(linear, token, lane % kLanes);
      if (lane % kLanes == 0) {
        scales[token] = scale;
      }
    }
  }

  // Over all columns, scaled.
  __device__ __forceinline__ float2 total(const SumPair<Shape>& at) const {
    float2 sum{};
#pragma unroll
    for (int i = 0; i < Shape::kWarps; ++i) {
      const float2 part = of_warps[at.tile][i][at.pair];
      sum.x += part.x;
      sum.y += part.y;
    }
    return {sum.x * scales[at.token], sum.y * scales[at.token]};
  }
};

// Finish: what happens with the sums. load_epilogue() loads what it needs for that while the sums are computed.
// kSlots: pieces of one tile that a warp visits at a time: a batch. kStages: visits that the ring holds.
template <typename Shape, typename Finish, int kSlots, int kStages, bool kManyBatches>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kTokens == 8 && Shape::kThreads == 256 ? 2 : 1)
    fused_linear(const FusedLinear linear, const Finish finish) {
  extern __shared__ uint4 ring[];
  __shared__ GroupSums<Shape> sums;
  using X = Activations<Shape, kSlots>;

  allow_next_launch();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const TileSpan tiles = tiles_of_block(linear);
  const int num_pieces = (linear.num_cols + Shape::kPieceColumns - 1) / Shape::kPieceColumns;
  const int num_batches = kManyBatches ? (num_pieces + kSlots * Shape::kWarps - 1) / (kSlots * Shape::kWarps) : 1;
  WeightRing<Shape, kSlots, kStages> weights(linear, tiles, num_batches, ring);
  weights.fill();
  finish.prefetch((tiles.first + warp) * kTileRows);
  wait_for_previous_launch();

  const X activations(linear);
  typename X::Batch x;
  activations.load(0, x);
  sums.set_scales(linear);
  activations.interleave_all(x);
  for (int group = 0; group < tiles.count; group += Shape::kGroup) {
    float4 loaded[Shape::kPasses];
    [[maybe_unused]] float2 row_scales[Shape::kPasses];
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const SumPair<Shape> at(linear, tiles, group, pass);
      loaded[pass] = at.exists ? finish.load_epilogue(at.token, at.row) : float4{};
      if constexpr (Shape::kFloat8) {
        row_scales[pass] = at.exists ? *reinterpret_cast<const float2*>(linear.row_scales + at.row) : float2{};
      }
    }

    const int num_in_group = min(Shape::kGroup, tiles.count - group);
#pragma unroll 1
    for (int batch = 0; batch < num_batches; ++batch) {
      [[maybe_unused]] typename X::Batch next_x;
      if constexpr (kManyBatches) {
        activations.load(batch + 1 == num_batches ? 0 : batch + 1, next_x);
      }
      // Not unrolled: the launches of a step are many and short, and fetching their instructions takes time too.
#pragma unroll 1
      for (int tile = 0; tile < num_in_group; tile += Shape::kVisitTiles) {
        weights.wait();
        multiply_tile<Shape>(x, weights, sums.of_warps[tile][warp], kManyBatches && batch > 0);
        weights.release();
      }
      if constexpr (kManyBatches) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
          for (int piece = 0; piece < X::kPieces; ++piece) {
#pragma unroll
            for (int i = 0; i < X::kEights; ++i) {
              x[slot][piece][i] = next_x[slot][piece][i];
            }
          }
        }
        activations.interleave_all(x);
      }
    }
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const SumPair<Shape> at(linear, tiles, group, pass);
      if (at.tile >= num_in_group) {
        break;
      }
      float2 sum = at.exists ? sums.total(at) : float2{};
      if constexpr (Shape::kFloat8) {
        sum = {sum.x * row_scales[pass].x, sum.y * row_scales[pass].y};
      }
      finish(at.exists, at.token, at.row, loaded[pass], sum);
    }
    if (group + Shape::kGroup < tiles.count) {
      __syncthreads();  // the next group's sums go to the same place
    }
  }
}

}  // namespace common
