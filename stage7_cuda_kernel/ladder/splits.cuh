// What steps 4 to 6 share: a context cut into pieces that different thread blocks walk, and the merge of their results.
//
// The results of a head lie in the workspace just as those of half-warps lie in shared memory (PartialSoftmax in
// decode_merge.cuh: for each part and query the largest score, the sum of weights, and the weighted sum of V), and are
// joined by the same arithmetic.
#pragma once

#include <algorithm>

#include "ladder_parts.cuh"

namespace stage7 {

struct Splits {
  unsigned char* memory;
  int count;        // of each context; 1: nothing to merge, outputs are written at once
  int num_heads;    // that are walked: query heads, or kv heads if a group walks together
  int num_queries;  // that walk together
  std::size_t bytes_per_head;

  std::size_t bytes(int num_sequences) const {
    return count == 1 ? 0 : bytes_per_head * static_cast<std::size_t>(num_sequences * num_heads);
  }
  __device__ __forceinline__ PartialSoftmax<kDimensions> results(int sequence, int head) const {
    return {memory + (std::int64_t{sequence} * num_heads + head) * bytes_per_head, count, num_queries};
  }
};

// As many pieces as give every multiprocessor `resident` thread blocks, but none shorter than 128 tokens: a piece costs
// its part of the merge. All contexts are cut into equally many, because the host does not know their lengths.
inline Splits choose_splits(const PageShape& shape, const Batch& batch, int num_heads, int resident, void* memory) {
  constexpr int kMinTokens = 128;
  check_ladder(shape, batch);
  const int slots = resident * common::device_limits().num_multiprocessors;
  const int most = (max_context(batch) + kMinTokens - 1) / kMinTokens;
  const int count = std::clamp(slots / std::max(1, batch.num_sequences * num_heads), 1, most);
  const int num_queries = batch.num_heads / num_heads;
  return {.memory = static_cast<unsigned char*>(memory),
          .count = count,
          .num_heads = num_heads,
          .num_queries = num_queries,
          .bytes_per_head = PartialSoftmax<kDimensions>::bytes(count, num_queries)};
}

// The blocks of a context that piece `split` has: begin … end - 1. Short contexts have pieces without any.
struct BlockRange {
  int begin;
  int end;

  __device__ __forceinline__ BlockRange(int length, int split, int count) {
    const std::int64_t num_blocks = num_tiles_of(length);
    begin = static_cast<int>(num_blocks * split / count);
    end = static_cast<int>(num_blocks * (split + 1) / count);
  }
};

// Joins the num_parts results of a thread block, and writes the output, or this piece's result. All threads call it.
__device__ __forceinline__ void finish_split(const LadderCall& call, const Splits& splits,
                                             const PartialSoftmax<kDimensions>& exchange, int num_parts, int sequence,
                                             int head, int split) {
  const auto thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  for (int query = thread / 32; query < splits.num_queries; query += static_cast<int>(blockDim.x) / 32) {
    const MergedRow<kDimensions> merged = merge_parts(exchange, num_parts, query);
    if (splits.count == 1) {
      store_output(merged, call.output + head_row(call, sequence, head * splits.num_queries + query));
      continue;
    }
    const PartialSoftmax<kDimensions> results = splits.results(sequence, head);
    float* row = results.row(split, query) + thread % 32 * MergedRow<kDimensions>::kValues;
#pragma unroll
    for (int i = 0; i < MergedRow<kDimensions>::kValues; ++i) {
      row[i] = merged.values[i];
    }
    if (thread % 32 == 0) {
      results.max_and_sum[split * splits.num_queries + query] = make_float2(merged.largest, merged.sum);
    }
  }
}

// The second launch (step4_split.cu). Without effect if nothing was cut.
void merge_splits(const LadderCall& call, const Splits& splits, cudaStream_t stream);

}  // namespace
