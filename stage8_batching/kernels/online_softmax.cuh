// The online softmax, as all attention kernels keep it, and how the results of several are joined.
//
// It is stage 3's: on the way through the tokens, a query has the largest score so far, the sum of the weights
// 2^(score - largest), and the sum of weights times V. A larger score multiplies both sums by
// 2^(old largest - new largest), which is what they would have been had that score been known. Scores are in units of
// log2(e), so that weights are powers of 2.
//
// Threads that have seen different tokens have a part of the result each. Parts are joined by the same rule: bring all
// to the largest score of any, then add. So the result is that of one pass, but for rounding, and because parts are
// added in a fixed order, equal shares give equal bits.
#pragma once

#include <cmath>

#include <cstddef>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"

namespace stage8 {

// What the product of a query and a key is multiplied by: scores are kept in units of log2(e), so that the weights are
// powers of 2.
inline float score_scale(int head_dim) {
  return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_dim)));
}

// The two numbers that say what a weighted sum of V is worth.
struct RunningSoftmax {
  float largest = -INFINITY;
  float sum = 0.0F;  // of the weights 2^(score - largest)

  // To a larger score, or an equal one. Returns what the weighted sum of V has to be multiplied by.
  __device__ __forceinline__ float raise_to(float new_largest) {
    const float factor = common::exp2_fast(largest - new_largest);
    largest = new_largest;
    sum *= factor;
    return factor;
  }

  // Of a score that is still to be multiplied by `scale`.
  __device__ __forceinline__ float weight_of(float score, float scale) const {
    return common::exp2_fast(fmaf(scale, score, -largest));
  }
};

// One query's online softmax and, of its weighted sum of V, the kValues dimensions that a thread has.
template <int kValues>
struct SoftmaxRow : RunningSoftmax {
  float values[kValues] = {};

  __device__ __forceinline__ void rescale(float new_largest) {
    const float factor = raise_to(new_largest);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] *= factor;
    }
  }

  // A token, by its weight and its V.
  template <typename Value>
  __device__ __forceinline__ void add(float weight, const Value& value) {
    sum += weight;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] += weight * value[i];
    }
  }

  // A part of the result, whose own largest score must not be above this row's. A part without tokens has the sum 0,
  // and perhaps this row has seen none either: -infinity less -infinity is no number.
  __device__ __forceinline__ void add_part(float2 max_and_sum, const float (&part)[kValues]) {
    const float weight = max_and_sum.y > 0.0F ? common::exp2_fast(max_and_sum.x - largest) : 0.0F;
    sum += weight * max_and_sum.y;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] += weight * part[i];
    }
  }
};

// Neighbouring floats in accesses as wide as their number allows, which is also what the address must be aligned to.
template <int kCount>
__device__ __forceinline__ void load_floats(float (&to)[kCount], const float* from) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = from[i];
    }
  }
}

template <int kCount>
__device__ __forceinline__ void store_floats(float* to, const float (&from)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<float4*>(to + i) = {from[i], from[i + 1], from[i + 2], from[i + 3]};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = from[i];
    }
  }
}

// Where the parts of one head's result are put to be joined: num_parts for each of the head's `group` queries.
template <int kHeadDim>
struct PartialSoftmax {
  // Four floats more than a row: threads that write the same dimension of neighbouring queries hit different banks.
  static constexpr int kPitch = kHeadDim + 4;
  float* outputs;           // [num_parts, group, kPitch]
  float2* maxima_and_sums;  // [num_parts, group]
  int group;

  // A multiple of 16, so that several of them may lie one after the other.
  static constexpr std::size_t bytes(int num_parts, int group) {
    const std::size_t size = static_cast<std::size_t>(num_parts * group) * (kPitch * sizeof(float) + sizeof(float2));
    return (size + 15) / 16 * 16;
  }
  // memory: bytes() of it, at a multiple of 16.
  __device__ __forceinline__ PartialSoftmax(void* memory, int num_parts, int num_queries)
      : outputs(static_cast<float*>(memory)),
        maxima_and_sums(reinterpret_cast<float2*>(outputs + num_parts * num_queries * kPitch)),
        group(num_queries) {}

  __device__ __forceinline__ float* row(int part, int query) const { return outputs + (part * group + query) * kPitch; }
  __device__ __forceinline__ float2& max_and_sum(int part, int query) const {
    return maxima_and_sums[part * group + query];
  }

  // A thread's dimensions, from `dimension` on. The thread with the first ones also stores the maximum and the sum.
  template <int kValues>
  __device__ __forceinline__ void store(int part, int query, const SoftmaxRow<kValues>& result, int dimension) const {
    store_floats(row(part, query) + dimension, result.values);
    if (dimension == 0) {
      max_and_sum(part, query) = make_float2(result.largest, result.sum);
    }
  }
};

// Joins the parts of one query, in the kValues dimensions from `dimension` on.
template <int kValues, int kHeadDim>
__device__ __forceinline__ SoftmaxRow<kValues> merge_parts(const PartialSoftmax<kHeadDim>& parts, int num_parts,
                                                           int query, int dimension) {
  SoftmaxRow<kValues> merged;
#pragma unroll
  for (int part = 0; part < num_parts; ++part) {
    merged.largest = fmaxf(merged.largest, parts.max_and_sum(part, query).x);
  }
#pragma unroll
  for (int part = 0; part < num_parts; ++part) {
    const float2 max_and_sum = parts.max_and_sum(part, query);
    float values[kValues];
    load_floats(values, parts.row(part, query) + dimension);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = max_and_sum.y > 0.0F ? values[i] : 0.0F;  // a part without tokens has left its row unwritten
    }
    merged.add_part(max_and_sum, values);
  }
  return merged;
}

}  // namespace
