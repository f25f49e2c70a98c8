#include "common/cuda/model/product_kernel.h"

#include <algorithm>

namespace common {
namespace {

// A row of weights, in elements. Measured on an H200, a step of a whole model:
//
//     longest row             tokens       rows      tiles   wide tiles    library
//     1,536 (SmolLM2-135M)        32     636 us                  662 us
//                                 64                             705 us     867 us
//                                128                             910 us   1,001 us
//     3,072 (Qwen3-0.6B)          16     881 us     958 us       990 us
//                                 32   1,174 us   1,017 us     1,063 us
//                                 64              1,368 us     1,259 us   1,354 us
//                                128                           1,787 us   1,725 us
//     8,192 (Llama-3.2-1B)        16     928 us   1,004 us       957 us
//                                 32   1,188 us   1,042 us       976 us
//                                 64              1,105 us     1,065 us   1,193 us
//                                128                           1,314 us   1,454 us
//     14,336 (Llama-3-8B)          2   4,006 us                4,072 us
//                                  4   4,065 us                4,059 us
//                                  8   4,191 us   4,242 us     4,064 us
//                                 64              4,745 us     4,574 us   5,090 us
//                                128                           5,543 us   5,929 us
//
// On an H100, the last model's wide tiles are faster with 2 tokens (5,436 us, by rows 5,540) and even with 1 (5,425 us,
// 5,486).
//
// With float8 weights, which the library does not take, so that all of them are unpacked before:
//
//     longest row             tokens       rows      tiles    library
//     1,536 (SmolLM2-135M)        64              1,005 us
//                                128              1,455 us
//     8,192 (Llama-3.2-1B)        16     859 us     923 us
//                                 32   1,275 us     944 us
//                                 64              1,104 us
//                                128              1,486 us
//     14,336 (Llama-3-8B)          8   3,044 us   3,318 us
//                                 16   3,832 us   3,347 us
//                                 32              3,501 us
//                                 64              4,244 us
//                                128              6,130 us  14,124 us
//
// With float8 activations too, which the library takes; on an H100:
//
//     longest row             tokens                 tiles    library
//     8,192 (Llama-3.2-1B)       128              1,645 us   1,849 us
//     14,336 (Llama-3-8B)         64              4,785 us   5,476 us
//                                 66              6,135 us   5,556 us
//                                 96              6,068 us   5,865 us
//                                128              6,501 us   6,224 us
constexpr int kShortRow = 2048;
constexpr int kMediumRow = 4096;
constexpr int kLongRow = 8192;

// The largest numbers of tokens for which wide tiles are faster than the library: in general, and for rows of medium
// length.
constexpr int kMaxFusedTokens = 128;
constexpr int kMaxMediumTokens = 64;

// Wide tiles are faster than tiles; for rows of medium length only from this many tokens on.
constexpr int kMinMediumWideTokens = 33;

// The largest number of tokens for which tiles unpack float8 weights with long rows, even where activations may be
// float8.
constexpr int kMaxUnpackedTokens = 64;

bool is_medium(int longest_row) { return longest_row > kShortRow && longest_row <= kMediumRow; }
bool has_wide_tiles(const ProductModel& model) { return model.has_tiles && model.weights != WeightType::kFloat8; }

// By rows, every thread block reads all of x: the longer the rows, the fewer the tokens for which that is little.
int max_row_tokens(const ProductModel& model) {
  if (model.precision == Precision::kFloat32) {
    return 1;
  }
  const int with_longest = has_wide_tiles(model) ? 2 : 8;
  return model.longest_row <= kShortRow ? 32 : model.longest_row <= kLongRow ? 16 : with_longest;
}

ProductModel of_logits(ProductModel model) {
  model.weights = WeightType::kAuto;
  model.activations = ActivationType::kAuto;
  return model;
}

}  // namespace

ProductKernel product_kernel(const ProductModel& model, int num_tokens) {
  if (num_tokens <= max_row_tokens(model)) {
    return ProductKernel::kRows;
  }
  if (num_tokens > max_fused_tokens(model)) {
    return ProductKernel::kLibrary;
  }
  const int min_wide_tokens = is_medium(model.longest_row) ? kMinMediumWideTokens : 1;
  const bool is_wide = has_wide_tiles(model) && num_tokens >= min_wide_tokens;
  return is_wide ? ProductKernel::kWideTiles : ProductKernel::kTiles;
}

int max_fused_tokens(const ProductModel& model) {
  const int max_tokens = !model.has_tiles                       ? max_row_tokens(model)
                         : model.weights == WeightType::kFloat8 ? max_tiled_tokens(true)
                         : is_medium(model.longest_row)         ? kMaxMediumTokens
                                                                : kMaxFusedTokens;
  const bool may_be_float8 = model.activations == ActivationType::kFloat8 && model.longest_row > kLongRow;
  return may_be_float8 ? std::min(max_tokens, kMaxUnpackedTokens) : max_tokens;
}

ProductKernel logits_kernel(const ProductModel& model, int num_rows) {
  if (num_rows > max_fused_logits(model)) {
    return ProductKernel::kLibrary;
  }
  const ProductKernel kernel = product_kernel(of_logits(model), num_rows);
  return kernel == ProductKernel::kWideTiles ? ProductKernel::kTiles : kernel;
}

int max_fused_logits(const ProductModel& model) {
  return std::min(max_fused_tokens(of_logits(model)), max_tiled_tokens(false));
}

}  // namespace common
