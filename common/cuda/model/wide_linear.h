// The fused products for up to 128 tokens: how they are cut and launched. For .cu files; others see
// fused_linear.h.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda/model/linear_arguments.h"
#include "common/cuda/model/tile_pieces.cuh"
#include "common/cuda/model/tiled_linear.h"

namespace common {

inline constexpr int kMaxWideRows = 128;  // of a tile

// row_step: a tile's rows must be a multiple of it. The plan has no rows if the GPU has no room for a tile.
TilePlan plan_wide(const FusedLinear& linear, int row_step, const ClusterCounts& clusters);

// x must be the first num_tokens rows of linear.x, and the weights bfloat16.
void wide_product(const FusedLinear& linear, const TileFinish& finish, cudaStream_t stream);

// The same with the caller's plan: up to kMaxWideRows rows, a multiple of 8, or of 64 for kAddToResidual; and 1, 2, 4
// or 8 ranks.
void launch_wide(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream);

}  // namespace common
