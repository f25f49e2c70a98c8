// Which kernel computes the matrix products of a step: a choice by the number of tokens.
#pragma once

#include "common/cuda/precision.h"

namespace common {

enum class ProductKernel {
  kRows,       // fused_kernel.cuh
  kTiles,      // tiled_kernel.cuh: in bfloat16, on Hopper, up to max_tiled_tokens()
  kWideTiles,  // wide_kernel.cuh: the same with bfloat16 weights, up to kMaxWideTokens
  kLibrary,    // matrix_products.h: any number of tokens, and nothing is fused
};
constexpr int max_tiled_tokens(bool float8) { return float8 ? 128 : 64; }
inline constexpr int kMaxWideTokens = 128;

// Whether kTiles and kWideTiles can be used: the GPU has its instructions, and the build its kernels.
bool can_tile(Precision precision);

// The fastest kernel for num_tokens tokens, for a model whose longest row of weights has longest_row columns. The
// measurements are in product_kernel.cpp.
ProductKernel product_kernel(Precision precision, WeightType weights, ActivationType activations, int num_tokens,
                             int longest_row);

// The largest number of tokens for which product_kernel() is a fused product.
int max_fused_tokens(Precision precision, WeightType weights, ActivationType activations, int longest_row);

}  // namespace common
