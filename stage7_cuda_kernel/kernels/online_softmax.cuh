// The online softmax of a query, and how partial results are joined.
//
// It is stage 3's: while a query passes through the tokens, it keeps the largest score so far, the sum of the weights
// 2^(score - largest), and the sum of weights times V. A larger score multiplies both sums by
// 2^(old largest - new largest), which is what they would have been had that score been known. Scores are in units of
// log2(e), so that weights are powers of 2.
//
// Threads that have seen different tokens each have a part of the result. Parts are joined by the same rule: rescale
// each part to the largest score of all parts, then add. So the result is the same as in one pass, except for rounding;
// and because parts are added in a fixed order, equal shares give equal bits.
#pragma once

#include <cmath>

#include "common/cuda/ptx.cuh"

namespace stage7 {

// The factor for the product of a query and a key: scores are kept in units of log2(e), so that the weights are powers
// of 2.
inline float score_scale(int head_dim) {
  return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_dim)));
}

// One query's online softmax, and the kValues dimensions of its weighted sum of V that a thread has.
template <int kValues>
struct SoftmaxRow {
  float largest = -INFINITY;
  float sum = 0.0F;  // the sum of the weights 2^(score - largest)
  float values[kValues] = {};

  // new_largest is not smaller than `largest`.
  __device__ __forceinline__ void rescale(float new_largest) {
    const float factor = common::exp2_fast(largest - new_largest);
    largest = new_largest;
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] *= factor;
    }
  }

  // Adds a token, given its weight and its V.
  __device__ __forceinline__ void add(float weight, const float (&value)[kValues]) {
    sum += weight;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] += weight * value[i];
    }
  }

  // Adds a part of the result; its largest score must not be above this row's. A part without tokens has the sum 0, and
  // gets the weight 0: this row may have seen none either, and -infinity minus -infinity is a NaN.
  __device__ __forceinline__ void add_part(float2 max_and_sum, const float (&part)[kValues]) {
    const float weight = max_and_sum.y > 0.0F ? common::exp2_fast(max_and_sum.x - largest) : 0.0F;
    sum += weight * max_and_sum.y;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] += weight * part[i];
    }
  }
};

}  // namespace
