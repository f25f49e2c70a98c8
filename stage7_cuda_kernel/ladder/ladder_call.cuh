// What no step of the ladder is about: the arguments of a call and their check, and where a token lies.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "ladder.h"

namespace stage7 {

inline constexpr int kDimensions = 128;
inline constexpr int kBlockTokens = 16;
inline constexpr int kMaxGroup = 8;  // query heads that share a kv head

// The arguments of every kernel.
struct LadderCall {
  const Element* queries;      // [num_sequences, num_heads, kDimensions]
  Element* output;             // the same
  const Element* keys;         // [num_blocks, num_kv_heads, kBlockTokens, kDimensions]
  const Element* values;       // the same
  const int* context_lengths;  // [num_sequences]; 0: nothing is computed, and nothing written
  const int* block_tables;     // one after the other
  const int* table_starts;     // [num_sequences]: where each sequence's table begins
  int num_sequences;
  int num_heads;
  int num_kv_heads;
  int max_context;  // no context is longer. The call has no more: the lengths are on the device
  float scale;      // 1 / sqrt(kDimensions), times log2(e): weights are powers of 2
};

inline void check_ladder(const PageShape& shape, const BatchArrays& batch) {
  common::check_batch(kPlainKernels, shape, batch);
  COMMON_CHECK(shape.type == ScalarType::kBFloat16 && shape.head_dim == kDimensions && shape.block_size == kBlockTokens,
               "the ladder is for bfloat16, head_dim 128 and blocks of 16");
  COMMON_CHECK(batch.num_heads <= kMaxGroup * shape.num_kv_heads, "the ladder is for groups of up to 8 query heads");
  COMMON_CHECK(batch.num_sequences < 1 << 16, "a grid has at most 65,535 sequences");
}

inline LadderCall ladder_call(const Pages& pages, const BatchArrays& batch, const void* queries, void* output) {
  common::check_pages(kPlainKernels, pages);
  check_ladder(pages.shape, batch);
  COMMON_CHECK(batch.num_sequences == 0 || (common::is_aligned(queries) && common::is_aligned(output)),
               "queries and output begin at multiples of 16 bytes");
  return {.queries = static_cast<const Element*>(queries),
          .output = static_cast<Element*>(output),
          .keys = static_cast<const Element*>(pages.keys),
          .values = static_cast<const Element*>(pages.values),
          .context_lengths = batch.context_lengths,
          .block_tables = batch.block_tables,
          .table_starts = batch.table_starts,
          .num_sequences = batch.num_sequences,
          .num_heads = batch.num_heads,
          .num_kv_heads = pages.shape.num_kv_heads,
          .max_context = batch.max_blocks_per_sequence * kBlockTokens,
          .scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(kDimensions)))};
}

// Where the row of a token begins, in keys and in values. The block table says where the token's block is.
// Call: LadderCall, or PromptCall.
template <typename Call>
__device__ std::int64_t row_offset(const Call& call, const int* table, int kv_head, int position) {
  const std::int64_t block = table[position / kBlockTokens];
  return ((block * call.num_kv_heads + kv_head) * kBlockTokens + position % kBlockTokens) * kDimensions;
}

inline dim3 grid_of(int x, int y = 1, int z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

}  // namespace
