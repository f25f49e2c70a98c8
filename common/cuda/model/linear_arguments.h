// The arguments of a fused product (fused_linear.h), for its callers and for the kernels that compute it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/cuda/model/product_kernel.h"
#include "common/cuda/precision.h"

namespace common {

// Every pointer is a device pointer; weights and x are in the model's precision.
//
// The norm is spread over three launches, so that it needs no launch of its own. The kernel that writes the residual
// stream also writes it times the next norm's weights, as x, and the sums of its squares, one for every few columns.
// The product of x and the weights is then divided by the root of the mean square: one number for each token.
inline constexpr int kSquaresColumns = 8;       // of one sum in kRows: a tile's
inline constexpr int kTileSquaresColumns = 64;  // of one sum in kTiles and kWideTiles

struct FusedLinear {
  ProductKernel kernel = ProductKernel::kRows;  // or kTiles, kWideTiles
  Precision precision = Precision::kBFloat16;
  const void* weights = nullptr;      // [num_rows, num_cols]
  const float* row_scales = nullptr;  // [num_rows]: the weights are float8 (scalars.cuh), times these, and x is
                                      //   bfloat16. nullptr: they are in the precision
  int num_rows = 0;
  int num_cols = 0;  // a multiple of 8, or of 16 with float8
  int num_tokens = 0;
  const void* x = nullptr;  // [num_x_rows, num_cols]
  const int* rows =
      nullptr;         // [num_tokens], which rows of x; nullptr: the first num_tokens, as both kinds of tiles need it
  int num_x_rows = 0;  // a row beyond them gives NaN
  const float* squares = nullptr;  // [num_x_rows, num_cols / the kernel's columns of a sum, rounded up]; nullptr: x is
                                   //   what it is
  float epsilon = 0.0F;
};

struct Rotary {
  const float2* rotation = nullptr;  // [num_tokens, head_dim / 2]: cosine and sine; nullptr: nothing is rotated
  int head_dim = 0;
  int q_rows = 0;
  int kv_rows = 0;
  const float* bias = nullptr;  // [q_rows + 2 * kv_rows], added before that; may be nullptr

  // Nothing is rotated, and kv has the whole product: [num_tokens, num_rows].
  static Rotary none(int num_rows, const float* bias) { return {.kv_rows = num_rows / 2, .bias = bias}; }
};

// The residual stream, and what is written with it for the next product.
struct Residual {
  float* values = nullptr;      // [num_tokens, num_cols]
  const float* norm = nullptr;  // [num_cols], the next norm's weights
  void* weighted = nullptr;     // [num_tokens, num_cols], in the model's precision: values * norm. May be nullptr for
                                //   look_up (llama_kernels.h), which then leaves out the squares too
  float* squares = nullptr;     // [num_tokens, num_cols / squares_columns, rounded up]
  int squares_columns = kSquaresColumns;
  int num_cols = 0;
};

inline constexpr int kMaxPeers = 8;

// A sum by its place in its step: row r's number is first_numbers[r] + index.
struct SumNumber {
  const unsigned* first_numbers = nullptr;  // [kMaxPushedTokens]
  unsigned index = 0;
};

// Two neighbouring columns of a part: {float, number, float, number}.
using PushedPair = uint4;

// Where a product stores its part of a sum (fused_push, pushed_sum.h).
struct PushedPart {
  PushedPair* places[kMaxPeers] = {};  // in each GPU's memory, [num_tokens, num_cols / 2]
  int num_places = 0;
  SumNumber number{};
  const float* residual = nullptr;  // [num_tokens, num_cols], added to the part; nullptr: nothing is
  int num_cols = 0;
};

}  // namespace common
