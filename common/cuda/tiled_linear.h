// The fused products by tiles: how they are cut and launched. For .cu files; others see fused_linear.h.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda/fused_linear.h"
#include "common/cuda/tiled_kernel.cuh"

namespace common {

// How many clusters of so many blocks, 1 to 8, run at the same time.
int max_clusters(int cluster_size);

// row_step: what a tile's rows must be a multiple of.
TilePlan plan_tiles(const FusedLinear& linear, int row_step);

// x must be the first num_tokens rows of linear.x.
void tiled_product(const FusedLinear& linear, const TileFinish& finish, cudaStream_t stream);

// With a plan of one's own.
void launch_tiled(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream);

}  // namespace common
