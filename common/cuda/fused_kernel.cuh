// A decode step reads every weight once for one token, or for a few: 2 operations a weight and token, where the chip
// could do 300 in the time that the weight takes to arrive. So this is about keeping memory busy, also between
// launches, of which a step has hundreds:
//
// - Weights do not depend on the launch before. A thread block asks for as much of its share as fits into a ring in
//   shared memory, and only then waits for the launch before to finish.
// - The ring has 192 KB: a multiprocessor has room for nothing else. With half of that, two launches fit side by side
//   and the second could ask even earlier, but a step of Llama-3.2-1B took 914 us and not 826 (H200): what the first
//   still has to load waits behind the second's weights, and where a multiprocessor has room for two, two blocks of one
//   launch land on some and none on others.
// - Each block takes tiles of 8 rows of the weights, which lie next to each other in memory. The 8 warps of a block
//   share the columns out: each multiplies its columns of the 8 rows, and their sums are added up at the end.
// - A thread copies into the ring what it will itself read from there, 16 bytes at a time: no barriers in the loop.
// - The norm costs no pass of its own: its scale is one number a token, applied to the finished sums.
#pragma once

#include "common/cuda/fused_pieces.cuh"
#include "common/cuda/launch.h"

namespace common {

// Finish: what becomes of the sums. load_epilogue() loads what it needs for that while the sums are under way.
// kSlots: pieces of one tile that a warp visits at a time: a batch. kStages: visits that the ring holds.
// kTokens: the largest number of tokens, 8, 16 or 32.
template <typename Scalar, typename Finish, int kTokens, int kSlots, int kStages, bool kManyBatches>
__global__ void __launch_bounds__(kThreads, kTokens == 8 ? 2 : 1)
    fused_linear(const FusedLinear linear, const Finish finish) {
  extern __shared__ uint4 ring[];      // [kStages][kSlots][kThreads]
  constexpr int kPairs = 4 * kTokens;  // of a tile's sums: one token's, of two rows
  __shared__ float2 partial_sums[kGroup<kTokens>][kWarps][kPairs];
  __shared__ float scales[kTokens];

  allow_next_launch();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int total_tiles = (linear.num_rows + kTileRows - 1) / kTileRows;
  const auto first_of = [&](unsigned block) { return static_cast<int>(std::int64_t{block} * total_tiles / gridDim.x); };
  const int first_tile = first_of(blockIdx.x);
  const int num_tiles = first_of(blockIdx.x + 1) - first_tile;
  const int num_pieces = (linear.num_cols + kPieceColumns<Scalar> - 1) / kPieceColumns<Scalar>;
  const int num_batches = kManyBatches ? (num_pieces + kSlots * kWarps - 1) / (kSlots * kWarps) : 1;

  constexpr int kStride = kColumnsOfSlot<Scalar>;
  const auto first_column = [&](int batch) {
    return (batch * kSlots * kWarps + warp) * kPieceColumns<Scalar> + lane % 4 * kColumns<Scalar>;
  };
  const auto slot_of = [&](int stage, int slot) { return ring + (stage * kSlots + slot) * kThreads + threadIdx.x; };
  // One visit is one group of copies, also when there is nothing left to copy: so waiting can count groups.
  Visit<kTokens> ahead;
  const auto copy_visit = [&](int stage) {
    if (ahead.tile < num_tiles) {
      const int row = (first_tile + ahead.tile) * kTileRows + lane / 4;
      const int column = first_column(ahead.batch);
      const int num_columns = row < linear.num_rows ? linear.num_cols - column : 0;
      const Scalar* source = static_cast<const Scalar*>(linear.weights) + std::int64_t{row} * linear.num_cols + column;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        copy_async(slot_of(stage, slot), source + slot * kStride, slot * kStride < num_columns);
      }
      ahead.advance(num_tiles, num_batches);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    copy_visit(stage);
  }
  finish.prefetch((first_tile + warp) * kTileRows);
  wait_for_previous_launch();

  constexpr int kEights = kTokens / 8;  // of tokens
  int x_rows[kEights];
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    x_rows[i] = row_of_x(linear, sizeof(Scalar) == 2 ? 8 * i + lane / 4 : 0);
  }
  const auto load = [&](int batch, uint4(&destination)[kSlots][kEights]) {
    const int column = first_column(batch);
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const Scalar* source =
          static_cast<const Scalar*>(linear.x) + std::int64_t{max(x_rows[i], 0)} * linear.num_cols + column;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const bool exists = x_rows[i] >= 0 && column + slot * kStride < linear.num_cols;
        destination[slot][i] = exists ? load_x_piece(source + slot * kStride) : uint4{};
      }
    }
  };
  const unsigned zero = linear.num_cols < 0 ? 1 : 0;
  uint4 x[kSlots][kEights];
  const auto interleave_x = [&] {
    if constexpr (kTokens > 8) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int i = 0; i < kEights; i += 2) {
          interleave(x[slot][i], x[slot][i + 1], zero);
        }
      }
    }
  };
  load(0, x);
  constexpr int kLanes = 32 / kEights;  // for each token's scale
  const int scaled_token = warp * kEights + lane / kLanes;
  if (warp * kEights < linear.num_tokens) {
    const float scale = norm_scale<kLanes>(linear, scaled_token, lane % kLanes);
    if (lane % kLanes == 0) {
      scales[scaled_token] = scale;
    }
  }
  interleave_x();
  int stage = 0;
  constexpr int kPasses = kGroup<kTokens> * kPairs / kThreads;  // pairs of sums that a thread finishes
  for (int group = 0; group < num_tiles; group += kGroup<kTokens>) {
    const bool is_last_group = group + kGroup<kTokens> >= num_tiles;
    const auto tile_of = [&](int pass) { return (pass * kThreads + static_cast<int>(threadIdx.x)) / kPairs; };
    const auto token_of = [&](int pass) { return (pass * kThreads + static_cast<int>(threadIdx.x)) % kPairs / 4; };
    const auto row_of = [&](int pass) { return (first_tile + group + tile_of(pass)) * kTileRows + lane % 4 * 2; };
    const auto finishes = [&](int pass) {
      return group + tile_of(pass) < num_tiles && token_of(pass) < linear.num_tokens && row_of(pass) < linear.num_rows;
    };
    float4 loaded[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      loaded[pass] = finishes(pass) ? finish.load_epilogue(token_of(pass), row_of(pass)) : float4{};
    }

    const int num_in_group = min(kGroup<kTokens>, num_tiles - group);
#pragma unroll 1
    for (int batch = 0; batch < num_batches; ++batch) {
      [[maybe_unused]] uint4 next_x[kSlots][kEights];
      if constexpr (kManyBatches) {
        load(batch + 1 == num_batches ? 0 : batch + 1, next_x);
      }
      // Not unrolled: the launches of a step are many and short, and fetching their instructions takes time too.
#pragma unroll 1
      for (int i = 0; i < num_in_group; ++i) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        const bool add = kManyBatches && batch > 0;
        if constexpr (kTokens == 8) {
          float even[2] = {};
          float odd[2] = {};
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) {
            multiply(even, odd, x[slot][0], *slot_of(stage, slot), Scalar{});
          }
          store_partial(&partial_sums[i][warp][0], lane, even, odd, add, Scalar{});
        } else {
          float sums[kTokens / 16][2][4] = {};
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) {
            const uint4 w = *slot_of(stage, slot);
#pragma unroll
            for (int j = 0; j < kTokens / 16; ++j) {
              multiply_full(sums[j][0], x[slot][2 * j], w.x, w.y);
              multiply_full(sums[j][1], x[slot][2 * j + 1], w.z, w.w);
            }
          }
#pragma unroll
          for (int j = 0; j < kTokens / 16; ++j) {
            float2* destination = &partial_sums[i][warp][64 * j + lane];
            store_sums(destination, sums[j][0][0] + sums[j][1][0], sums[j][0][1] + sums[j][1][1], add);
            store_sums(destination + 32, sums[j][0][2] + sums[j][1][2], sums[j][0][3] + sums[j][1][3], add);
          }
        }
        copy_visit(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      if constexpr (kManyBatches) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            x[slot][j] = next_x[slot][j];
          }
        }
        interleave_x();
      }
    }
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (group + tile_of(pass) >= num_tiles) {
        break;
      }
      const bool exists = finishes(pass);
      float2 sum{};
      if (exists) {
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
          const float2 part = partial_sums[tile_of(pass)][i][(pass * kThreads + threadIdx.x) % kPairs];
          sum.x += part.x;
          sum.y += part.y;
        }
        sum.x *= scales[token_of(pass)];
        sum.y *= scales[token_of(pass)];
      }
      finish(exists, token_of(pass), row_of(pass), loaded[pass], sum);
    }
    if (!is_last_group) {
      __syncthreads();
    }
  }
}

}  // namespace common
