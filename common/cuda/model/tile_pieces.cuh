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

// One of the finishes. It is chosen at run time: that costs no measurable time, and there are a fourth as many
// kernels to compile.
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
  int parts = 1;  // of the tokens: each is another cluster's
};

// What a thread block has to do: tiles first_tile, first_tile + tile_step, …, num_rounds in all, and of each the
// stages' columns first_stage to last_stage - 1, for one part of the tokens.
struct TileWork {
  TilePlan plan;
  int rank;
  int part;
  int first_tile;
  int tile_step;
  int num_rounds;
  int first_stage;
  int last_stage;

  __device__ __forceinline__ TileWork(const FusedLinear& linear, const TilePlan& tile_plan, int stage_columns)
      : plan(tile_plan) {
    const int cluster = static_cast<int>(blockIdx.x) / plan.ranks;
    rank = static_cast<int>(blockIdx.x) % plan.ranks;
    part = cluster % plan.parts;
    first_tile = cluster / plan.parts;
    tile_step = static_cast<int>(gridDim.x) / (plan.ranks * plan.parts);
    const int num_tiles = (linear.num_rows + plan.rows - 1) / plan.rows;
    num_rounds = (num_tiles - first_tile + tile_step - 1) / tile_step;
    const int stages = (linear.num_cols + stage_columns - 1) / stage_columns;
    first_stage = rank * stages / plan.ranks;
    last_stage = (rank + 1) * stages / plan.ranks;
  }

  __device__ __forceinline__ int tile(int round) const { return first_tile + round * tile_step; }
};

// The ring's barriers.
template <int kStages>
struct RingBarriers {
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

#if COURSE_WGMMA

// One thread prepares the barriers. A stage is full when weights and x have come.
template <int kStages>
__device__ __forceinline__ void init_ring(RingBarriers<kStages>& barriers, int releasing_threads) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(shared_address(&barriers.full[stage]), 2);
    init_barrier(shared_address(&barriers.empty[stage]), releasing_threads);
  }
  fence_barrier_init();
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

#endif  // COURSE_WGMMA

}  // namespace common
