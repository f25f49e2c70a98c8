#include "common/cuda/model/product_kernel.h"

#include <algorithm>

namespace common {
namespace {

// A row of weights, in elements. Measured on an H200, a step of a whole model:
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
//
// With float8 weights, which the library does not take, so that all of them are unpacked before:
//
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
//     8,192 (Llama-3.2-1B)       128              1,645 us   1,849 us
//     14,336 (Llama-3-8B)         64              4,785 us   5,476 us
//                                 66              6,135 us   5,556 us
//                                 96              6,068 us   5,865 us
//                                128              6,501 us   6,224 us
//
// By wide tiles; on an H100, beside the kernel that was taken before:
//
//     longest row             tokens   wide tiles   before
//     1,536 (SmolLM2-135M)        33     716 us     868 us (library)
//                                 64     764 us     913 us
//                                128   1,000 us   1,110 us
//     3,072 (Qwen3-0.6B)          64   1,633 us   1,831 us (tiles)
//                                 96   2,032 us   1,990 us (library)
//                                128   2,292 us   2,225 us
//     8,192 (Llama-3.2-1B)        64   1,443 us   1,394 us (tiles)
//                                 96   1,591 us   1,679 us (library)
//                                128   1,710 us   1,800 us
//     14,336 (Llama-3-8B)         64   6,282 us   6,301 us (tiles)
//                                128   7,138 us   7,927 us (library)
constexpr int kShortRow = 2048;
constexpr int kMediumRow = 4096;
constexpr int kLongRow = 8192;

// Up to so many tokens, wide tiles are faster than the library; with rows of medium length, up to fewer.
constexpr int kMaxFusedTokens = 128;
constexpr int kMaxMediumTokens = 64;

// From so many tokens on, wide tiles are faster than tiles; with rows longer than medium, only for more tokens than
// tiles serve.
constexpr int kMinWideTokens = 33;

// Up to so many tokens, float8 weights with long rows are unpacked by tiles, even where activations may be float8.
constexpr int kMaxUnpackedTokens = 64;

// By rows, every thread block reads all of x: the longer the rows, the fewer the tokens for which that is little.
int max_row_tokens(Precision precision, int longest_row) {
  if (precision == Precision::kFloat32) {
    return 1;
  }
  return longest_row <= kShortRow ? 32 : longest_row <= kLongRow ? 16 : 8;
}

}  // namespace

// Short rows are by rows until wide tiles take over: by tiles, a launch has more to do before and after its products.
ProductKernel product_kernel(Precision precision, WeightType weights, ActivationType activations, int num_tokens,
                             int longest_row) {
  if (num_tokens <= max_row_tokens(precision, longest_row)) {
    return ProductKernel::kRows;
  }
  if (num_tokens > max_fused_tokens(precision, weights, activations, longest_row)) {
    return ProductKernel::kLibrary;
  }
  const bool float8 = weights == WeightType::kFloat8;
  const int min_wide_tokens = float8 || longest_row > kMediumRow ? max_tiled_tokens(float8) + 1 : kMinWideTokens;
  return num_tokens < min_wide_tokens ? ProductKernel::kTiles : ProductKernel::kWideTiles;
}

int max_fused_tokens(Precision precision, WeightType weights, ActivationType activations, int longest_row) {
  const int max_tokens = !can_tile(precision)                                   ? max_row_tokens(precision, longest_row)
                         : weights == WeightType::kFloat8                       ? max_tiled_tokens(true)
                         : longest_row > kShortRow && longest_row <= kMediumRow ? kMaxMediumTokens
                                                                                : kMaxFusedTokens;
  return activations == ActivationType::kFloat8 && longest_row > kLongRow ? std::min(max_tokens, kMaxUnpackedTokens)
                                                                          : max_tokens;
}

}  // namespace common
