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

// One over the root of the mean square of a row of x, from the sums of its squares; in every lane of the warp. NaN for
// a row that does not exist.
__device__ __forceinline__ float norm_scale(const FusedLinear& linear, int token, int lane) {
  const int row = linear.rows == nullptr ? token : linear.rows[token];
  const bool exists = row >= 0 && row < linear.num_x_rows;
  if (linear.squares == nullptr) {
    return exists ? 1.0F : __int_as_float(0x7FFFFFFF);
  }
  const int count = linear.num_cols / kSquaresColumns;
  const float* squares = linear.squares + std::int64_t{exists ? row : 0} * count;
  float sum = 0.0F;
  for (int first = lane; first < count; first += 8 * 32) {
    float values[8];  // all under way before the first is added
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = first + 32 * i < count ? __ldcg(squares + first + 32 * i) : 0.0F;
    }
#pragma unroll
    for (const float value : values) {
      sum += value;
    }
  }
  sum = warp_sum(sum);
  return exists ? rsqrtf(sum / static_cast<float>(linear.num_cols) + linear.epsilon) : __int_as_float(0x7FFFFFFF);
}

// Finish: what becomes of the sums. early() loads what it needs for that while the sums are under way.
// kSlots: pieces of one tile that a warp visits at a time: a batch. kStages: visits that the ring holds.
template <typename Scalar, typename Finish, int kSlots, int kStages, bool kManyBatches>
__global__ void __launch_bounds__(kThreads, 2) fused_linear(const FusedLinear linear, const Finish finish) {
  extern __shared__ uint4 ring[];                      // [kStages][kSlots][kThreads]
  __shared__ float2 partial_sums[kGroup][kWarps][32];  // [.][.][token, pair of rows]
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
  Visit ahead;
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

  const int token = sizeof(Scalar) == 2 ? lane / 4 : 0;
  int x_row = token;
  if (linear.rows != nullptr && token < linear.num_tokens) {
    x_row = linear.rows[token];
  }
  const bool has_row = token < linear.num_tokens && x_row >= 0 && x_row < linear.num_x_rows;
  const Scalar* x_values = static_cast<const Scalar*>(linear.x) + std::int64_t{has_row ? x_row : 0} * linear.num_cols;
  const auto load = [&](int batch, uint4(&destination)[kSlots]) {
    const int column = first_column(batch);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const bool exists = has_row && column + slot * kStride < linear.num_cols;
      destination[slot] = exists ? __ldcg(reinterpret_cast<const uint4*>(x_values + column + slot * kStride)) : uint4{};
    }
  };
  uint4 x[kSlots];
  load(0, x);
  if (warp < linear.num_tokens) {
    const float scale = norm_scale(linear, warp, lane);
    if (lane == 0) {
      scales[warp] = scale;
    }
  }
  int stage = 0;
  for (int group = 0; group < num_tiles; group += kGroup) {
    const bool is_last_group = group + kGroup >= num_tiles;
    const int my_tile = group + warp;
    const int my_row = (first_tile + my_tile) * kTileRows + lane % 4 * 2;
    const bool finishes = my_tile < num_tiles && lane / 4 < linear.num_tokens && my_row < linear.num_rows;
    const float4 early = finishes ? finish.early(lane / 4, my_row) : float4{};

    const int num_in_group = min(kGroup, num_tiles - group);
#pragma unroll 1
    for (int batch = 0; batch < num_batches; ++batch) {
      [[maybe_unused]] uint4 next_x[kSlots];
      if constexpr (kManyBatches) {
        load(batch + 1 == num_batches ? 0 : batch + 1, next_x);
      }
      // Not unrolled: the launches of a step are many and short, and fetching their instructions takes time too.
#pragma unroll 1
      for (int i = 0; i < num_in_group; ++i) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        float even[2] = {};
        float odd[2] = {};
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          multiply(even, odd, x[slot], *slot_of(stage, slot), Scalar{});
        }
        copy_visit(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        store_partial(&partial_sums[i][warp][0], lane, even, odd, kManyBatches && batch > 0, Scalar{});
      }
      if constexpr (kManyBatches) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          x[slot] = next_x[slot];
        }
      }
    }
    __syncthreads();
    if (my_tile < num_tiles) {
      float2 sum{};
      if (finishes) {
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
          sum.x += partial_sums[warp][i][lane].x;
          sum.y += partial_sums[warp][i][lane].y;
        }
        sum.x *= scales[lane / 4];
        sum.y *= scales[lane / 4];
      }
      finish(finishes, lane / 4, my_row, early, sum);
    }
    if (!is_last_group) {
      __syncthreads();
    }
  }
}

}  // namespace common
