// Step 5: the group reads together. One thread block walks a kv head for all query heads that share it.
//
// It is stage 4's idea, and the purpose of grouped-query attention: K and V of a token are loaded once, and every query
// of the group uses them while they are in registers. A thread keeps 8 dimensions of each query and of each output.
//
// bytes for 32 x 8,192: each byte of K and V is loaded once, 1.07 GB in place of 4.3. flops: 4.3 G, 4 for a byte; but
// on plain arithmetic units, where a score also costs four exchanges between threads. A group of 4 takes 811
// instructions of a warp for 8 tokens, 213 M in all, of 132 x 4 that the device starts in each of 1.8 G cycles a
// second: 224 us, nearly what the bytes take. Neither hides the other completely.
// measured: 1x8192 23.0 us (32%), 32x8192 354 us (66%), 32xragged 1,001 us (20%) on an NVIDIA H200, 2026-11-23, at
// 5fcb232
//
// Why it is faster: 25 instructions for a token and query head in place of 46. Not because of the bytes: L1 had caught
// the repeated reads. Where it is not: one sequence, which has 8 heads to share out in place of 32. Its context is cut
// into twice as many pieces, and to merge 64 takes 8.2 us of 23.2 us (2026-11-28). Without groups (MHA) it is step 4.
// And a group of 8 needs as many queries in registers: 221 for a thread, so few warps are there to hide each other's
// waiting; arithmetic grows with the group although the bytes do not.
#include <algorithm>

#include "ladder_call.cuh"

namespace stage7 {
namespace {

constexpr int kThreads = 128;
static_assert(kThreads == kDimensions);  // a thread for each dimension of the output

using Vec = common::Vec16<Element>;  // 16 bytes: what a thread moves at once
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;  // 16: half a warp moves a row
constexpr int kHalfWarps = kThreads / kVecsPerRow;

constexpr int kResident = 4;  // thread blocks on a multiprocessor

// What a thread block has found in its piece of a context, for one query.
struct Partial {
  float output[kDimensions];
  float largest;
  float sum;
};

// A context is cut between blocks, into `splits` pieces or, if there are fewer blocks, one for each: none is empty.
__device__ int num_pieces(int length, int splits) { return min(splits, (length + kBlockTokens - 1) / kBlockTokens); }

__device__ Vec load_vec(const Element* row, int vec) {
  return {*reinterpret_cast<const uint4*>(row + vec * kVecElements)};
}

__device__ float dot(const Vec& a, const Vec& b) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kVecElements; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

// The sum of a number of each thread of a half-warp; all 16 get it.
__device__ float over_half_warp(float x) {
#pragma unroll
  for (int distance = kVecsPerRow / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0U, x, distance);
  }
  return x;
}

// kQueries: the group, rounded up to a power of 2; the queries past its end repeat the last one.
template <int kQueries>
__global__ void __launch_bounds__(kThreads) attend(LadderCall call, int splits, Partial* partials) {
  constexpr int kUnroll = kQueries <= 4 ? 4 : 2;  // rows that a half-warp has in flight: what registers are left for
  const auto thread = static_cast<int>(threadIdx.x);
  const int half_warp = thread / kVecsPerRow;
  const int vec = thread % kVecsPerRow;
  const auto kv_head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto piece = static_cast<int>(blockIdx.z);
  const int length = call.context_lengths[sequence];
  const int pieces = num_pieces(length, splits);
  if (piece >= pieces) {
    return;
  }
  const int num_blocks = (length + kBlockTokens - 1) / kBlockTokens;
  const int first = num_blocks * piece / pieces * kBlockTokens;
  const int end = min(num_blocks * (piece + 1) / pieces * kBlockTokens, length);
  const int* table = call.block_tables + call.table_starts[sequence];
  const int group = call.num_heads / call.num_kv_heads;
  const std::int64_t first_row = std::int64_t{sequence} * call.num_heads + kv_head * group;
  Vec queries[kQueries];
#pragma unroll
  for (int query = 0; query < kQueries; ++query) {
    queries[query] = load_vec(call.queries + (first_row + min(query, group - 1)) * kDimensions, vec);
  }

  // The half-warp's online softmaxes over every eighth token.
  float largest[kQueries];
  float sum[kQueries] = {};
  float output[kQueries][kVecElements] = {};
#pragma unroll
  for (int query = 0; query < kQueries; ++query) {
    largest[query] = -INFINITY;
  }
  for (int begin = first; begin < end; begin += kHalfWarps * kUnroll) {
    Vec keys[kUnroll];
    Vec values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {  // past the end: the last token again, so that no thread diverges
      const int position = min(begin + i * kHalfWarps + half_warp, end - 1);
      const std::int64_t offset = row_offset(call, table, kv_head, position);
      keys[i] = load_vec(call.keys + offset, vec);
      values[i] = load_vec(call.values + offset, vec);
    }
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      float scores[kUnroll];
      float new_largest = largest[query];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        scores[i] = over_half_warp(dot(queries[query], keys[i])) * call.scale;
        new_largest = fmaxf(new_largest, scores[i]);
      }
      const float factor = common::exp2_fast(largest[query] - new_largest);
      largest[query] = new_largest;
      sum[query] *= factor;
#pragma unroll
      for (int j = 0; j < kVecElements; ++j) {
        output[query][j] *= factor;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const bool exists = begin + i * kHalfWarps + half_warp < end;
        const float weight = exists ? common::exp2_fast(scores[i] - largest[query]) : 0.0F;
        sum[query] += weight;
#pragma unroll
        for (int j = 0; j < kVecElements; ++j) {
          output[query][j] += weight * values[i][j];
        }
      }
    }
  }

  // The half-warps' results, joined: a thread for each dimension, one query after the other.
  __shared__ float maxima[kHalfWarps];
  __shared__ float sums[kHalfWarps];
  __shared__ float outputs[kHalfWarps][kDimensions];
#pragma unroll
  for (int query = 0; query < kQueries; ++query) {
    if (query == group) {
      return;
    }
    __syncthreads();  // threads may still read the results of the query before
    if (vec == 0) {
      maxima[half_warp] = largest[query];
      sums[half_warp] = sum[query];
    }
#pragma unroll
    for (int j = 0; j < kVecElements; ++j) {
      outputs[half_warp][vec * kVecElements + j] = output[query][j];
    }
    __syncthreads();
    float joined_largest = -INFINITY;
    for (int i = 0; i < kHalfWarps; ++i) {
      joined_largest = fmaxf(joined_largest, maxima[i]);
    }
    float joined_sum = 0.0F;
    float joined = 0.0F;
    for (int i = 0; i < kHalfWarps; ++i) {
      const float weight = common::exp2_fast(maxima[i] - joined_largest);
      joined_sum += weight * sums[i];
      joined += weight * outputs[i][thread];
    }
    const std::int64_t row = first_row + query;
    if (splits == 1) {
      call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
      continue;
    }
    Partial& partial = partials[row * splits + piece];
    partial.output[thread] = joined;
    if (thread == 0) {
      partial.largest = joined_largest;
      partial.sum = joined_sum;
    }
  }
}

// The second launch: joins the pieces as `attend` joins what its threads have.
__global__ void __launch_bounds__(kThreads) merge(LadderCall call, int splits, const Partial* partials) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const int pieces = num_pieces(call.context_lengths[sequence], splits);
  if (pieces == 0) {
    return;
  }
  const std::int64_t row = std::int64_t{sequence} * call.num_heads + head;
  partials += row * splits;
  float joined_largest = -INFINITY;
  for (int i = 0; i < pieces; ++i) {
    joined_largest = fmaxf(joined_largest, partials[i].largest);
  }
  float joined_sum = 0.0F;
  float joined = 0.0F;
  for (int i = 0; i < pieces; ++i) {
    const float weight = common::exp2_fast(partials[i].largest - joined_largest);
    joined_sum += weight * partials[i].sum;
    joined += weight * partials[i].output[thread];
  }
  call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
}

// kResident places on every multiprocessor, divided by sequences and heads, rounded down; at most one piece for each 8
// blocks of the longest context, rounded up: each piece adds to the merge. The lengths are known on the device.
int num_splits(const BatchArrays& batch, int num_heads) {
  constexpr int kMinBlocks = 8;
  const int slots = kResident * common::device_limits().num_multiprocessors;
  const int most = (batch.max_blocks_per_sequence + kMinBlocks - 1) / kMinBlocks;
  return std::clamp(slots / std::max(1, batch.num_sequences * num_heads), 1, most);
}

std::size_t workspace_bytes(const PageShape& shape, const BatchArrays& batch) {
  check_ladder(shape, batch);
  return sizeof(Partial) * static_cast<std::size_t>(batch.num_sequences) * static_cast<std::size_t>(batch.num_heads) *
         static_cast<std::size_t>(num_splits(batch, shape.num_kv_heads));
}

void decode(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (call.num_sequences == 0) {
    return;
  }
  auto* partials = static_cast<Partial*>(workspace);
  const int splits = num_splits(batch, call.num_kv_heads);
  const int group = call.num_heads / call.num_kv_heads;
  const auto kernel = group == 1 ? attend<1> : group == 2 ? attend<2> : group <= 4 ? attend<4> : attend<8>;
  common::launch(kernel, grid_of(call.num_kv_heads, call.num_sequences, splits), kThreads, 0, stream,
                 common::Overlap::kNone, call, splits, partials);
  if (splits > 1) {
    common::launch(merge, grid_of(call.num_heads, call.num_sequences), kThreads, 0, stream, common::Overlap::kNone,
                   call, splits, partials);
  }
}

}  // namespace

const LadderStep kGroup = {"5 group together", workspace_bytes, nullptr, decode};

}  // namespace
