// Tiled products with plans that the test chooses: the part of it that nvcc has to compile.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "common/cuda/model/fused_linear.h"

namespace tests {

// How many clusters of `ranks` blocks run at the same time.
int max_clusters(int ranks);

// How many blocks share a tile's columns, on a GPU that runs clusters[n] clusters of n blocks at the same time. 0:
// there is no plan.
int planned_ranks(const common::FusedLinear& linear, const std::array<int, 9>& clusters);

// linear.kernel is kTiles or kWideTiles. logits: [num_tokens, num_rows]. Each tile has `rows` rows, whose columns are
// shared among `ranks` blocks. If `rows` is 0, the product chooses its own plan.
void tiled_logits(const common::FusedLinear& linear, int rows, int ranks, float* logits, cudaStream_t stream);

}  // namespace tests
