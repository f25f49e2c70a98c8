// Random q, K and V for tests of attention, and how far two correct answers may differ.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "common/base/tensor.h"
#include "common/math/sampling.h"
#include "tests/support/compare.h"

namespace tests {

struct AttentionShape {
  int num_heads = 4;
  int num_kv_heads = 4;  // divides num_heads
  int head_dim = 8;
  int num_layers = 1;
};

// A stage's cache with these heads and layers.
template <typename KvCacheShape>
KvCacheShape cache_shape_of(const AttentionShape& shape, int num_blocks, int block_size) {
  KvCacheShape result;
  result.num_layers = shape.num_layers;
  result.num_blocks = num_blocks;
  result.block_size = block_size;
  result.num_heads = shape.num_heads;
  result.num_kv_heads = shape.num_kv_heads;
  result.head_dim = shape.head_dim;
  return result;
}

// What the model passes to attention in one layer, for some new tokens.
struct LayerInput {
  common::Matrix q;  // [num_tokens, num_heads * head_dim]
  common::Matrix k;  // [num_tokens, num_kv_heads * head_dim]
  common::Matrix v;  // [num_tokens, num_kv_heads * head_dim]
};
using TokenInputs = std::vector<LayerInput>;  // [num_layers]

inline common::Matrix random_matrix(Eigen::Index rows, Eigen::Index cols, common::Random& random) {
  return common::Matrix::NullaryExpr(rows, cols, [&] { return static_cast<float>(random.normal()); });
}

// Standard normal q, K and V, different in every head and layer: a wrong head or layer cannot go unnoticed.
inline TokenInputs random_inputs(const AttentionShape& shape, int num_tokens, common::Random& random) {
  const Eigen::Index q_cols = Eigen::Index{shape.num_heads} * shape.head_dim;
  const Eigen::Index kv_cols = Eigen::Index{shape.num_kv_heads} * shape.head_dim;
  TokenInputs inputs(static_cast<std::size_t>(shape.num_layers));
  for (LayerInput& input : inputs) {
    input.q = random_matrix(num_tokens, q_cols, random);
    input.k = random_matrix(num_tokens, kv_cols, random);
    input.v = random_matrix(num_tokens, kv_cols, random);
  }
  return inputs;
}

// 2^-24: the largest relative error of one rounding to float32.
inline constexpr double kUnitRoundoff = 1.0 / (1 << 24);

// How far attention over random_inputs() may be from the exact result.
//
// Rounding errors scatter, so the error of n additions grows like sqrt(n) (Higham and Mary, SIAM J. Sci. Comput. 41(5),
// 2019). With standard normal q and K the scores have size 1 and an error of sqrt(head_dim) roundings, which becomes
// the relative error of the weights; the sums over the context add sqrt(context_length) more. V reaches 4. The factor
// 16 is this 4 times another 4, because a stage may add in another order. A misplaced row, head or weight changes the
// output in its first or second digit, four orders of magnitude above.
inline tests::Tolerance rounding_tolerance(const AttentionShape& shape, Eigen::Index context_length) {
  const double roundings =
      std::sqrt(static_cast<double>(shape.head_dim)) + std::sqrt(static_cast<double>(context_length));
  return {16.0 * kUnitRoundoff * roundings, 0.0};
}

}  // namespace tests
