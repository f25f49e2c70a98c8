#include "common/cuda/fused_linear.h"

namespace common {
namespace {

// Of weights, in elements. Measured on an H200, a step of a whole model:
//
//     longest row             tokens       rows      tiles    library
//     1,536 (SmolLM2-135M)        32     705 us     799 us     868 us
//                                 64                964 us     923 us
//     8,192 (Llama-3.2-1B)        16     966 us   1,045 us
//                                 32   1,247 us   1,061 us   1,147 us
//                                 64              1,167 us   1,270 us
//                                128              1,624 us   1,556 us
//     14,336 (Llama-3-8B)         16   5,201 us   4,349 us   4,802 us
//                                 64              4,922 us   5,352 us
constexpr int kShortRow = 2048;
constexpr int kLongRow = 8192;

// By rows, every thread block reads all of x: the longer the rows, the fewer the tokens for which that is little.
int max_row_tokens(Precision precision, int longest_row) {
  if (precision == Precision::kFloat32) {
    return 1;
  }
  return longest_row <= kShortRow ? 32 : longest_row <= kLongRow ? 16 : 8;
}

}  // namespace

ProductKernel product_kernel(Precision precision, WeightType weights, int num_tokens, int longest_row) {
  if (num_tokens <= max_row_tokens(precision, longest_row)) {
    return ProductKernel::kRows;
  }
  return num_tokens <= max_fused_tokens(precision, weights, longest_row) ? ProductKernel::kTiles
                                                                         : ProductKernel::kLibrary;
}

// By tiles, a launch has more to do before and after its products than by rows; short rows are too little in between.
int max_fused_tokens(Precision precision, WeightType weights, int longest_row) {
  const bool tiles = can_tile(precision) && weights != WeightType::kFloat8;
  return tiles && longest_row > kShortRow ? kMaxTiledTokens : max_row_tokens(precision, longest_row);
}

}  // namespace common
