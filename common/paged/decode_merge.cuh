// Decode attention's two merges of a head: the parts of a thread block's warps are joined through shared memory, and
// the partial results of the thread blocks that share the head are joined through the workspace. online_softmax.cuh has
// the arithmetic of both; this file says which thread reads which part, and where the result goes.
#pragma once

#include "common/cuda/model/scalars.cuh"
#include "common/paged/decode_plan.h"
#include "common/paged/element.h"
#include "common/paged/online_softmax.cuh"

namespace common {

// Stores a thread's dimensions of a partial result in row `row` of the workspace.
template <int kHeadDim, int kValues>
__device__ __forceinline__ void store_partial(const SoftmaxRow<kValues>& merged, const DecodeWorkspace& workspace,
                                              int row, int dimension) {
  store_floats(workspace.outputs + std::int64_t{row} * kHeadDim + dimension, merged.values);
  if (dimension == 0) {
    workspace.max_and_sum[row] = make_float2(merged.largest, merged.sum);
  }
}

// The place of a thread block's partial result in the workspace, in heads: the thread block's second place if the head
// begins with this thread block, else its first.
__device__ __forceinline__ int partial_place(int contributor, int first_contributor) {
  return 2 * contributor + (contributor == first_contributor ? 1 : 0);
}

// One thread's part of the merge of a head's contributors: four dimensions of one query.
inline constexpr int kColumnValues = 4;
using MergedColumn = SoftmaxRow<kColumnValues>;

// Joins every num_parts-th contributor of a head, beginning with number `part`. The time goes into the round trip to
// L2, about 600 ns, and not into the bytes; so max_and_sum and values of several contributors are loaded at once,
// before the largest score is known. Loads bypass L1, which does not see other blocks' stores.
template <int kHeadDim>
__device__ __forceinline__ MergedColumn merge_contributors(const DecodeWorkspace& workspace, int group, int column,
                                                           int first, int last, int part, int num_parts) {
  constexpr int kDepth = 8;
  const int query = column / (kHeadDim / kColumnValues);
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
      merged.add_part(max_and_sum[i], {values[i].x, values[i].y, values[i].z, values[i].w});
    }
  }
  return merged;
}

// The merge of a whole head by a thread block: a thread has a column of four dimensions. If there are more threads than
// columns, several threads share a column's contributors and join them in the exchange's memory; 4 rows a warp suffice.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void merge_head(void* memory, const DecodeWorkspace& workspace, Element* output, int group,
                                           int first, int last) {
  const int thread = static_cast<int>(threadIdx.x);
  const int num_columns = group * (kHeadDim / kColumnValues);
  const int num_parts = min(32 * kWarps / num_columns, kWarps);
  if (num_parts <= 1) {
    for (int column = thread; column < num_columns; column += 32 * kWarps) {
      store_output(merge_contributors<kHeadDim>(workspace, group, column, first, last, 0, 1),
                   output + column * kColumnValues);
    }
    return;
  }
  const PartialSoftmax<kHeadDim> exchange(memory, num_parts, group);
  const int part = thread / num_columns;
  const int column = thread - part * num_columns;
  const int query = column / (kHeadDim / kColumnValues);
  const int dimension = column * kColumnValues - query * kHeadDim;
  if (part < num_parts) {
    exchange.store(part, query, merge_contributors<kHeadDim>(workspace, group, column, first, last, part, num_parts),
                   dimension);
  }
  __syncthreads();
  if (part == 0) {
    store_output(merge_parts<kColumnValues>(exchange, num_parts, query, dimension), output + column * kColumnValues);
  }
  __syncthreads();  // the exchange may be overwritten
}

}  // namespace common
