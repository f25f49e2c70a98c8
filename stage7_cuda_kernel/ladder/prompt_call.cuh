// What no step of the prompts' ladder is about, beside what ladder_call.cuh has: the arguments of a call and their
// check, and which queries a thread block has.
#pragma once

#include <cmath>

#include "common/paged/checks.h"
#include "ladder_call.cuh"
#include "prompt_ladder.h"

namespace stage7 {

// The arguments of every kernel.
struct PromptCall {
  const Element* queries;      // [num_tokens, num_heads, kDimensions]
  Element* output;             // the same
  const Element* keys;         // [num_blocks, num_kv_heads, kBlockTokens, kDimensions]
  const Element* values;       // the same
  const int* query_starts;     // [num_sequences + 1]
  const int* context_lengths;  // [num_sequences]
  const int* block_tables;     // one after the other
  const int* table_starts;     // [num_sequences]: where each sequence's table begins
  int num_sequences;
  int num_heads;
  int num_kv_heads;
  float scale;  // 1 / sqrt(kDimensions), times log2(e): weights are powers of 2
};

inline void check_prompts(const Pages& pages, const BatchArrays& batch) {
  common::check_pages(kPlainKernels, pages);
  common::check_batch(kPlainKernels, pages.shape, batch);
  COMMON_CHECK(pages.shape.type == ScalarType::kBFloat16 && pages.shape.head_dim == kDimensions &&
                   pages.shape.block_size == kBlockTokens,
               "the prompts' ladder is for bfloat16, head_dim 128 and blocks of 16");
}

inline PromptCall prompt_call(const Pages& pages, const BatchArrays& batch, const int* query_starts,
                              const void* queries, void* output) {
  check_prompts(pages, batch);
  COMMON_CHECK(common::is_aligned(queries) && common::is_aligned(output),
               "queries and output begin at multiples of 16 bytes");
  return {.queries = static_cast<const Element*>(queries),
          .output = static_cast<Element*>(output),
          .keys = static_cast<const Element*>(pages.keys),
          .values = static_cast<const Element*>(pages.values),
          .query_starts = query_starts,
          .context_lengths = batch.context_lengths,
          .block_tables = batch.block_tables,
          .table_starts = batch.table_starts,
          .num_sequences = batch.num_sequences,
          .num_heads = batch.num_heads,
          .num_kv_heads = pages.shape.num_kv_heads,
          .scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(kDimensions)))};
}

// The rows of a thread block: `count` queries of one sequence, from `first` on; the first one's place in the context.
struct Rows {
  int sequence;
  int first;
  int count;
  int position;
};

// The rows of thread block `tile`: num_rows, or fewer at a sequence's end; none if it has nothing to do.
__device__ inline Rows find_rows(const PromptCall& call, int num_rows, int tile) {
  for (int sequence = 0; sequence < call.num_sequences; ++sequence) {
    const int start = call.query_starts[sequence];
    const int length = call.query_starts[sequence + 1] - start;
    const int first = tile * num_rows;
    if (first < length) {
      return {sequence, start + first, min(num_rows, length - first), call.context_lengths[sequence] - length + first};
    }
    tile -= (length + num_rows - 1) / num_rows;
  }
  return {};
}

// A thread block for each query head and each `rows` queries of a sequence. The host does not know the lengths, so the
// last thread blocks may have nothing to do.
inline dim3 prompt_grid(const PromptCall& call, int num_tokens, int rows) {
  return {static_cast<unsigned>(num_tokens / rows + call.num_sequences), static_cast<unsigned>(call.num_heads)};
}

}  // namespace
