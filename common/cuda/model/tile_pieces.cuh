// What the two products by tiles (tiled_kernel.cuh, wide_kernel.cuh) have in common: how a product is cut, how the copy
// engine fills a thread block's ring with panels of weights and of x, and what may be done with the sums.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/cuda/model/finishes.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/ring_position.cuh"
#include "common/cuda/runtime/launch.h"

namespace common {

static_assert(kPanelColumns == kTileSquaresColumns);

// One of the finishes. It is chosen at run time: that costs no measurable time, and there are a sixth as many kernels
// to compile.
struct TileFinish {
  enum class Kind { kRotateAndSplit, kGeneralRotateAndSplit, kAddToResidual, kGatedSilu, kPushSums, kStoreLogits };
  Kind kind;
  RotateAndSplit<__nv_bfloat16, false> rotate_and_split;
  AddToResidual<__nv_bfloat16, kPanelColumns> add_to_residual;
  GatedSilu<__nv_bfloat16> gated_silu;
  PushSums push_sums;
  StoreLogits store_logits;

  // Calls run() with the chosen finish.
  template <typename Run>
  __device__ __forceinline__ void visit(const Run& run) const {
    switch (kind) {
      case Kind::kRotateAndSplit:
        return run(rotate_and_split);
      case Kind::kGeneralRotateAndSplit:
        return run(RotateAndSplit<__nv_bfloat16>{rotate_and_split.rotary, rotate_and_split.q, rotate_and_split.kv});
      case Kind::kAddToResidual:
        return run(add_to_residual);
      case Kind::kGatedSilu:
        return run(gated_silu);
      case Kind::kPushSums:
        return run(push_sums);
      case Kind::kStoreLogits:
        return run(store_logits);
    }
  }
};

// How a product is cut.
struct TilePlan {
  int rows = 0;   // of a tile
  int ranks = 1;  // blocks that share its columns, a cluster. With more than one, each cluster has one tile
};

// What a thread block has to do: tiles first_tile, first_tile + tile_step, …, num_rounds in all, and in each the
// columns of stages first_stage to last_stage - 1.
struct TileWork {
  TilePlan plan;
  int rank;
  int first_tile;
  int tile_step;
  int num_rounds;
  int first_stage;
  int last_stage;

  __device__ __forceinline__ TileWork(const FusedLinear& linear, const TilePlan& tile_plan, int stage_columns)
      : plan(tile_plan) {
    rank = static_cast<int>(blockIdx.x) % plan.ranks;
    first_tile = static_cast<int>(blockIdx.x) / plan.ranks;
    tile_step = static_cast<int>(gridDim.x) / plan.ranks;
    const int num_tiles = (linear.num_rows + plan.rows - 1) / plan.rows;
    num_rounds = (num_tiles - first_tile + tile_step - 1) / tile_step;
    const int stages = (linear.num_cols + stage_columns - 1) / stage_columns;
    first_stage = rank * stages / plan.ranks;
    last_stage = (rank + 1) * stages / plan.ranks;
  }

  __device__ __forceinline__ int tile(int round) const { return first_tile + round * tile_step; }
};

// Barriers of warps, by number; 0 is __syncthreads's.
inline constexpr int kComputeBarrier = 1;  // of the threads that multiply
inline constexpr int kScalesBarrier = 2;   // of these, and of the threads that find the norm's scales

// The ring's barriers.
template <int kStages>
struct RingBarriers {
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

#if COURSE_WGMMA

// The next address at which a panel can begin. (If a pointer is aligned in this way, the compiler does not know that it
// is, and whole products take longer.)
__device__ __forceinline__ std::uint32_t align_ring(std::uint32_t address) { return (address + 1023) / 1024 * 1024; }

// All threads: a stage is full when weights and x have come, and empty when releasing_threads have arrived.
template <int kStages>
__device__ __forceinline__ void prepare_ring(const CUtensorMap& weights, const CUtensorMap& x,
                                             RingBarriers<kStages>& barriers, int releasing_threads) {
  if (threadIdx.x == 0) {
    prefetch_map(weights);
    prefetch_map(x);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared_address(&barriers.full[stage]), 2);
      init_barrier(shared_address(&barriers.empty[stage]), releasing_threads);
    }
    fence_barrier_init();
  }
  __syncthreads();
}

// One thread: copies one matrix's part of all stages into the ring, one after the other. `place` is where it lies in
// the first stage; row_of gives the first row for a round. It is kPanels panels of `rows` rows.
template <typename Shape, int kPanels, typename RowOf>
__device__ __forceinline__ void fill_ring(const CUtensorMap& matrix, const TileWork& work, std::uint32_t place,
                                          RingBarriers<Shape::kStages>& barriers, int rows, const RowOf& row_of,
                                          CachePolicy policy) {
  constexpr int kColumns = Shape::kStageColumns / kPanels;
  RingPosition<Shape::kStages> at;
  for (int round = 0; round < work.num_rounds; ++round) {
    for (int stage = work.first_stage; stage < work.last_stage; ++stage) {
      const std::uint32_t full = shared_address(&barriers.full[at.place]);
      wait_barrier(shared_address(&barriers.empty[at.place]), at.parity ^ 1);  // at first, it is
      arrive_expecting(full, kPanels * rows * kPanelRowBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_panel(place + static_cast<std::uint32_t>(at.place * Shape::kStageBytes + panel * rows * kPanelRowBytes),
                   matrix, stage * Shape::kStageColumns + panel * kColumns, row_of(round), full, policy);
      }
      at.advance();
    }
  }
}

// Computes the norm's scale of each of `count` tokens, one over the root of the mean square, from the sums of squares;
// 1 if there are none. scales[i] belongs to token first + i * step. `thread`: this thread's number among the kThreads
// that call this. Four lanes have kAtOnce tokens at a time, whose loads are in flight together.
template <int kThreads, int kAtOnce>
__device__ __forceinline__ void find_scales(const FusedLinear& linear, int first, int step, int count, int thread,
                                            float* scales) {
  if (linear.squares == nullptr) {
    for (int i = thread; i < count; i += kThreads) {
      scales[i] = 1.0F;
    }
    return;
  }
  constexpr int kLanes = 4;
  constexpr int kGroups = kThreads / kLanes;
  const int lane = thread % kLanes;
  const int num_sums = (linear.num_cols + kPanelColumns - 1) / kPanelColumns;
  wait_for_previous_launch();
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kAtOnce * kGroups) {
    const auto index = [&](int i) { return begin + i * kGroups + thread / kLanes; };
    // The last token stands in for tokens that do not exist, so that loads need no condition.
    int place[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      place[i] = (first + min(index(i), count - 1) * step) * num_sums;
    }
    float sums[kAtOnce] = {};
    if (num_sums % 4 == 0) {
#pragma unroll 2
      for (int column = 4 * lane; column < num_sums; column += 4 * kLanes) {
        float4 values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          values[i] = load_shared_floats(linear.squares + place[i] + column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          sums[i] += (values[i].x + values[i].y) + (values[i].z + values[i].w);
        }
      }
    } else {
#pragma unroll 4
      for (int column = lane; column < num_sums; column += kLanes) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          sums[i] += __ldcg(linear.squares + place[i] + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sums[i] += __shfl_xor_sync(0xFFFFFFFFU, sums[i], 1);
      sums[i] += __shfl_xor_sync(0xFFFFFFFFU, sums[i], 2);
      if (lane == 0 && index(i) < count) {
        scales[index(i)] = rsqrtf(sums[i] / static_cast<float>(linear.num_cols) + linear.epsilon);
      }
    }
  }
}

#endif  // COURSE_WGMMA

}  // namespace common
