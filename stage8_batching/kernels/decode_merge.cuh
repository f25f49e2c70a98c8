// Joining partial results of attention. A part is, for each query of the group: the largest score it saw, the sum of
// its weights 2^(score - largest), and the weighted sum of V. Parts are joined by bringing them to the same largest
// score: exactly what the online softmax does with its past, so the result is that of one pass, but for rounding.
//
// It happens twice: the warps of a thread block meet in shared memory, the thread blocks of a head in the workspace.
// Both add in a fixed order, so equal shares give equal bits.
#pragma once

#include "common/cuda/scalars.cuh"
#include "decode_plan.h"
#include "ptx.cuh"

namespace stage8 {

// Where the parts of one head are put together: [num_parts, group] rows of kPitch floats.
template <int kHeadDim>
struct PartialSoftmax {
  // Four floats more than a row: threads that write the same dimension of neighbouring queries hit different banks.
  static constexpr int kPitch = kHeadDim + 4;
  float* outputs;
  float2* max_and_sum;  // [num_parts, group]
  int group;

  static constexpr std::size_t bytes(int num_parts, int group) {
    return static_cast<std::size_t>(num_parts * group) * (kPitch * sizeof(float) + sizeof(float2));
  }
  __device__ __forceinline__ PartialSoftmax(void* memory, int num_parts, int num_queries)
      : outputs(static_cast<float*>(memory)),
        max_and_sum(reinterpret_cast<float2*>(outputs + num_parts * num_queries * kPitch)),
        group(num_queries) {}
  __device__ __forceinline__ float* row(int part, int query) const { return outputs + (part * group + query) * kPitch; }
};

// What an online softmax remembers of the scores it has seen, in units of log2(e).
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
};

// One query's result, spread over a warp: each thread has kHeadDim / 32 neighbouring dimensions.
template <int kHeadDim>
struct MergedRow : RunningSoftmax {
  static constexpr int kValues = kHeadDim / 32;
  float values[kValues] = {};

  __device__ __forceinline__ void add(const float* part, float weight) {
    const float* own = part + static_cast<int>(threadIdx.x) % 32 * kValues;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] += weight * own[i];
    }
  }
};

// Joins the parts of one query in shared memory.
template <int kHeadDim>
__device__ __forceinline__ MergedRow<kHeadDim> merge_parts(const PartialSoftmax<kHeadDim>& exchange, int num_parts,
                                                           int query) {
  MergedRow<kHeadDim> merged;
  for (int part = 0; part < num_parts; ++part) {
    merged.largest = fmaxf(merged.largest, exchange.max_and_sum[part * exchange.group + query].x);
  }
  for (int part = 0; part < num_parts; ++part) {
    const float2 max_and_sum = exchange.max_and_sum[part * exchange.group + query];
    if (max_and_sum.y > 0.0F) {  // a warp that had no tile of this head left its row unwritten
      const float weight = common::exp2_fast(max_and_sum.x - merged.largest);
      merged.sum += weight * max_and_sum.y;
      merged.add(exchange.row(part, query), weight);
    }
  }
  return merged;
}

template <int kHeadDim>
__device__ __forceinline__ void store_output(const MergedRow<kHeadDim>& merged, Element* output) {
  constexpr int kValues = MergedRow<kHeadDim>::kValues;
  Element* own = output + static_cast<int>(threadIdx.x) % 32 * kValues;
  const float inverse = 1.0F / merged.sum;
  if constexpr (kValues % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      *reinterpret_cast<std::uint32_t*>(own + i) =
          common::pack(merged.values[i] * inverse, merged.values[i + 1] * inverse);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      own[i] = common::from_float<Element>(merged.values[i] * inverse);
    }
  }
}

template <int kHeadDim>
__device__ __forceinline__ void store_partial(const MergedRow<kHeadDim>& merged, const DecodeWorkspace& workspace,
                                              int row) {
  constexpr int kValues = MergedRow<kHeadDim>::kValues;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* own = workspace.outputs + std::int64_t{row} * kHeadDim + lane * kValues;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    own[i] = merged.values[i];
  }
  if (lane == 0) {
    workspace.max_and_sum[row] = make_float2(merged.largest, merged.sum);
  }
}

// Which place of the workspace a thread block's partial result of a head has, in heads: its second one if the head
// begins with this thread block, else its first.
__device__ __forceinline__ int partial_place(int contributor, int first_contributor) {
  return 2 * contributor + (contributor == first_contributor ? 1 : 0);
}

// One thread's part of the merge of a head's contributors: four dimensions of one query.
struct MergedColumn : RunningSoftmax {
  float4 values = {0.0F, 0.0F, 0.0F, 0.0F};

  __device__ __forceinline__ void rescale(float new_largest) {
    const float factor = raise_to(new_largest);
    values = {values.x * factor, values.y * factor, values.z * factor, values.w * factor};
  }
  // largest is already that of all parts.
  __device__ __forceinline__ void add(float2 max_and_sum, float4 part) {
    const float weight = common::exp2_fast(max_and_sum.x - largest);
    sum += weight * max_and_sum.y;
    values.x += weight * part.x;
    values.y += weight * part.y;
    values.z += weight * part.z;
    values.w += weight * part.w;
  }
};

// Joins every num_parts-th of a head's contributors, beginning with the one numbered `part`. What costs time here is
// not the bytes but the way to L2 and back, about 600 ns; so max_and_sum and values of several contributors are asked
// for at once, before anything is known of the largest score. Loads pass L1 by: it knows nothing of other blocks'
// stores.
template <int kHeadDim>
__device__ __forceinline__ MergedColumn merge_contributors(const DecodeWorkspace& workspace, int group, int column,
                                                           int first, int last, int part, int num_parts) {
  constexpr int kDepth = 8;
  const int query = column / (kHeadDim / 4);
  MergedColumn merged;
  for (int begin = first + part; begin <= last; begin += kDepth * num_parts) {
    float2 max_and_sum[kDepth];
    float4 values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int contributor = begin + i * num_parts;
      max_and_sum[i] = {-INFINITY, 0.0F};
      values[i] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (contributor <= last) {
        const int place = partial_place(contributor, first) * group;
        max_and_sum[i] = __ldcg(workspace.max_and_sum + place + query);
        values[i] =
            __ldcg(reinterpret_cast<const float4*>(workspace.outputs + std::int64_t{place} * kHeadDim) + column);
      }
    }
    float largest = merged.largest;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      largest = fmaxf(largest, max_and_sum[i].x);
    }
    merged.rescale(largest);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      merged.add(max_and_sum[i], values[i]);
    }
  }
  return merged;
}

__device__ __forceinline__ void store_column(const MergedColumn& merged, Element* output) {
  const float inverse = 1.0F / merged.sum;
  *reinterpret_cast<uint2*>(output) = {common::pack(merged.values.x * inverse, merged.values.y * inverse),
                                       common::pack(merged.values.z * inverse, merged.values.w * inverse)};
}

// The merge of a whole head by a thread block: a thread has a column of four dimensions, and where threads are left
// over, several share a column's contributors and meet in the exchange.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void merge_head(const PartialSoftmax<kHeadDim>& exchange, const DecodeWorkspace& workspace,
                                           Element* output, int first, int last) {
  const int thread = static_cast<int>(threadIdx.x);
  const int num_columns = exchange.group * (kHeadDim / 4);
  const int num_parts = min(32 * kWarps / num_columns, kWarps);
  if (num_parts <= 1) {
    for (int column = thread; column < num_columns; column += 32 * kWarps) {
      store_column(merge_contributors<kHeadDim>(workspace, exchange.group, column, first, last, 0, 1),
                   output + column * 4);
    }
    return;
  }
  const int part = thread / num_columns;
  const int column = thread - part * num_columns;
  const int query = column / (kHeadDim / 4);
  const int dimension = column * 4 - query * kHeadDim;
  if (part < num_parts) {
    const MergedColumn merged =
        merge_contributors<kHeadDim>(workspace, exchange.group, column, first, last, part, num_parts);
    *reinterpret_cast<float4*>(exchange.row(part, query) + dimension) = merged.values;
    exchange.max_and_sum[part * exchange.group + query] =
        make_float2(merged.largest, merged.sum);  // equal in all columns
  }
  __syncthreads();
  if (part == 0) {
    MergedColumn merged;
    for (int p = 0; p < num_parts; ++p) {
      merged.largest = fmaxf(merged.largest, exchange.max_and_sum[p * exchange.group + query].x);
    }
    for (int p = 0; p < num_parts; ++p) {
      merged.add(exchange.max_and_sum[p * exchange.group + query],
                 *reinterpret_cast<const float4*>(exchange.row(p, query) + dimension));
    }
    store_column(merged, output + column * 4);
  }
  __syncthreads();  // the exchange may be written again
}

}  // namespace
