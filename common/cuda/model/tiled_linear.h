// The fused products by tiles: how they are cut and launched. For .cu files; others see fused_linear.h.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "common/cuda/model/linear_arguments.h"
#include "common/cuda/model/tiled_kernel.cuh"

namespace common {

// [n]: how many clusters of n blocks, 1 to 8, run at the same time; 0: not even one.
using ClusterCounts = std::array<int, 9>;
ClusterCounts max_clusters();  // on the current device

// A launch's overhead besides its stages: a cluster's exchange of sums has to be worth it.
struct LaunchOverhead {
  int ranks;
  double nanoseconds;
};

// What both products by tiles require of their arguments.
void check_for_tiles(const FusedLinear& linear);

// The thread blocks of a launch: a cluster for each tile, or as many as run at the same time.
dim3 grid_of(const FusedLinear& linear, const TilePlan& plan);

// row_step: a tile's rows must be a multiple of it. The plan has no rows if the GPU has no room for a tile.
TilePlan plan_tiles(const FusedLinear& linear, int row_step, const ClusterCounts& clusters);

// x must be the first num_tokens rows of linear.x.
void tiled_product(const FusedLinear& linear, const TileFinish& finish, cudaStream_t stream);

// The same with the caller's plan.
void launch_tiled(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream);

}  // namespace common
