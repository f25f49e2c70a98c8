// Attention by half-warps: 16 threads share one row of K or V, 8 dimensions each.
//
// attend_range() is the idea of step 3, and steps 4 and 5 keep it: one pass over the tokens, everything in registers. A
// half-warp has seen some of the tokens, and runs an online softmax (kernels/online_softmax.cuh) for each query.
#pragma once

#include "common/cuda/ptx.cuh"
#include "ladder_parts.cuh"

namespace stage7 {

inline constexpr int kHalfWarps = kThreads / kVecsPerRow;

// A half-warp's part of one query's output. Each thread has the dimensions of its vector.
using HalfWarpRow = SoftmaxRow<kVecElements>;

// Stores a half-warp's row in the exchange of the thread block, where merge_parts joins all rows.
__device__ __forceinline__ void store_half_warp(const HalfWarpRow& row, const PartialSoftmax<kDimensions>& exchange,
                                                int query) {
  const int thread = static_cast<int>(threadIdx.x);
  exchange.store(thread / kVecsPerRow, query, row, thread % kVecsPerRow * kVecElements);
}

__device__ __forceinline__ float dot(const ElementVec& a, const ElementVec& b) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kVecElements; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

// The sum over the 16 threads; each of them gets it.
__device__ __forceinline__ float over_half_warp(float x) {
#pragma unroll
  for (int distance = kVecsPerRow / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0U, x, distance);
  }
  return x;
}

// Tokens begin … end - 1 (at least one), shared out over the half-warps of the thread block; all of them call it.
// kUnroll: a half-warp's tokens whose K and V are in flight at once.
template <int kQueries, int kUnroll>
__device__ __forceinline__ void attend_range(const HeadPages& head, const ElementVec (&queries)[kQueries], float scale,
                                             int begin, int end, HalfWarpRow (&rows)[kQueries]) {
  const int half_warp = static_cast<int>(threadIdx.x) / kVecsPerRow;
  const int vec = static_cast<int>(threadIdx.x) % kVecsPerRow;
  for (; begin < end; begin += kHalfWarps * kUnroll) {
    ElementVec keys[kUnroll];
    ElementVec values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      // Past the end: the last token again, with weight 0. No thread diverges, and `largest` is always a score.
      const int position = min(begin + i * kHalfWarps + half_warp, end - 1);
      const std::int64_t offset = head.vec_offset(position, vec);
      keys[i] = load_vec(head.keys + offset);
      values[i] = load_vec(head.values + offset);
    }
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      float scores[kUnroll];
      float largest = rows[query].largest;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        scores[i] = over_half_warp(dot(queries[query], keys[i])) * scale;
        largest = fmaxf(largest, scores[i]);
      }
      rows[query].rescale(largest);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const bool exists = begin + i * kHalfWarps + half_warp < end;
        rows[query].add(exists ? common::exp2_fast(scores[i] - largest) : 0.0F, values[i]);
      }
    }
  }
}

}  // namespace
