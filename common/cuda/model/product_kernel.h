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

// What the choice depends on, besides the number of tokens.
struct ProductModel {
  Precision precision = Precision::kBFloat16;
  WeightType weights = WeightType::kAuto;  // of the layers
  ActivationType activations = ActivationType::kAuto;
  int longest_row = 0;     // of weights: columns
  bool has_tiles = false;  // can_tile(precision)
};

// The fastest kernel for a layer's products of num_tokens tokens. The measurements are in product_kernel.cpp.
ProductKernel product_kernel(const ProductModel& model, int num_tokens);

// The largest number of tokens for which product_kernel() is a fused product.
int max_fused_tokens(const ProductModel& model);

// The same for the output matrix, which is never float8. Nothing is fused into logits, and so neither wide tiles nor
// tiles of many tokens are faster than the library.
ProductKernel logits_kernel(const ProductModel& model, int num_rows);
int max_fused_logits(const ProductModel& model);

}  // namespace common
