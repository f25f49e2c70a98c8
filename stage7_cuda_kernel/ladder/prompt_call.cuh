// What no step of the prompts' ladder is about: the arguments of a call and their check.
#pragma once

#include <cmath>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "prompt_ladder.h"

namespace stage7 {

inline constexpr int kDimensions = 128;
inline constexpr int kBlockTokens = 16;

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

// A thread block for each query head and each `rows` queries of a sequence. The host does not know the lengths, so the
// last thread blocks may have nothing to do.
inline dim3 prompt_grid(const PromptCall& call, int num_tokens, int rows) {
  return {static_cast<unsigned>(num_tokens / rows + call.num_sequences), static_cast<unsigned>(call.num_heads)};
}

}  // namespace
