// Products by tiles with plans of the test's own: what nvcc has to compile of that.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "common/cuda/model/fused_linear.h"

namespace tests {

// How many clusters of so many blocks run at the same time.
int max_clusters(int ranks);

// How many blocks share a tile's columns, on a GPU that runs clusters[n] clusters of n blocks at the same time; 0:
// there is no plan.
int planned_ranks(const common::FusedLinear& linear, const std::array<int, 9>& clusters);

// logits: [num_tokens, num_rows]. Tiles of so many rows, of which `ranks` blocks share the columns; with 0 rows, the
// plan is the product's own.
void tiled_logits(const common::FusedLinear& linear, int rows, int ranks, float* logits, cudaStream_t stream);

}  // namespace tests
