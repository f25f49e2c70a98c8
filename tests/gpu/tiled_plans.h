// Products by tiles that are cut as the test chooses: the part of it that nvcc has to compile.
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

// Each tile has `rows` rows, whose columns are shared among `ranks` blocks. If `rows` is 0, the product is cut as in
// the engine.
struct Cut {
  int rows = 0;
  int ranks = 0;
};

// The functions of fused_linear.h. linear.kernel is kTiles or kWideTiles.
void tiled_logits(const common::FusedLinear& linear, Cut cut, float* logits, cudaStream_t stream);
void tiled_qkv(const common::FusedLinear& linear, Cut cut, const common::Rotary& rotary, void* q, void* kv,
               cudaStream_t stream);
void tiled_add(const common::FusedLinear& linear, Cut cut, const common::Residual& residual, cudaStream_t stream);
void tiled_gated_silu(const common::FusedLinear& linear, Cut cut, void* output, cudaStream_t stream);

}  // namespace tests
