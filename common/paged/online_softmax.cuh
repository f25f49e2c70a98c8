// The online softmax that all attention kernels keep, and how several partial results are joined.
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

#include <cuda_bf16.h>
#include <cmath>

#include <cstddef>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"

namespace common {

// The factor for the product of a query and a key: scores are kept in units of log2(e), so that the weights are powers
// of 2.
inline float score_scale(int head_dim) {
  return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_dim)));
}

// The two numbers without which a weighted sum of V has no meaning.
struct RunningSoftmax {
  float largest = -INFINITY;
  float sum = 0.0F;  // the sum of the weights 2^(score - largest)

  // new_largest is not smaller than `largest`. Returns the factor for the weighted sum of V.
  __device__ __forceinline__ float raise_to(float new_largest) {
    const float factor = common::exp2_fast(largest - new_largest);
    largest = new_largest;
    sum *= factor;
    return factor;
  }

  // The weight of a score that has not been multiplied by `scale` yet.
  __device__ __forceinline__ float weight_of(float score, float scale) const {
    return common::exp2_fast(fmaf(scale, score, -largest));
  }
};

// One query's online softmax, and the kValues dimensions of its weighted sum of V that a thread has.
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

  // Adds a token, given its weight and its V.
  template <typename Value>
  __device__ __forceinline__ void add(float weight, const Value& value) {
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

// Loads neighbouring floats by the widest accesses that kCount allows; the address must be aligned to that width.
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

// Where the parts of one head's result are stored to be joined: num_parts for each of the head's `group` queries.
template <int kHeadDim>
struct PartialSoftmax {
  // Four floats more than a row: threads that write the same dimension of neighbouring queries hit different banks.
  static constexpr int kPitch = kHeadDim + 4;
  float* outputs;           // [num_parts, group, kPitch]
  float2* maxima_and_sums;  // [num_parts, group]
  int group;

  // A multiple of 16, so that several PartialSoftmax may lie one after the other.
  static constexpr std::size_t bytes(int num_parts, int group) {
    const std::size_t size = static_cast<std::size_t>(num_parts * group) * (kPitch * sizeof(float) + sizeof(float2));
    return (size + 15) / 16 * 16;
  }
  // memory: bytes() bytes, at a multiple of 16.
  __device__ __forceinline__ PartialSoftmax(void* memory, int num_parts, int num_queries)
      : outputs(static_cast<float*>(memory)),
        maxima_and_sums(reinterpret_cast<float2*>(outputs + num_parts * num_queries * kPitch)),
        group(num_queries) {}

  __device__ __forceinline__ float* row(int part, int query) const { return outputs + (part * group + query) * kPitch; }
  __device__ __forceinline__ float2& max_and_sum(int part, int query) const {
    return maxima_and_sums[part * group + query];
  }

  // Stores a thread's dimensions, from `dimension` on. The thread with dimension 0 also stores the maximum and the sum.
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

// The merge of a query by a warp: each thread has kWarpValues neighbouring dimensions, from lane * kWarpValues on.
template <int kHeadDim>
constexpr int kWarpValues = kHeadDim / 32;

// Writes a thread's dimensions of the finished row, the first of them to `output`.
template <int kValues>
__device__ __forceinline__ void store_output(const SoftmaxRow<kValues>& merged, __nv_bfloat16* output) {
  const float inverse = 1.0F / merged.sum;
  if constexpr (kValues % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      *reinterpret_cast<uint2*>(output + i) = {
          common::pack(merged.values[i] * inverse, merged.values[i + 1] * inverse),
          common::pack(merged.values[i + 2] * inverse, merged.values[i + 3] * inverse)};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      output[i] = common::from_float<__nv_bfloat16>(merged.values[i] * inverse);
    }
  }
}

}  // namespace common
