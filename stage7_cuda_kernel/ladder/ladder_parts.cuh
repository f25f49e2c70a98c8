// What the steps of the ladder share, and what no step is about: arguments, the walk through the block table, and the
// reduction over a thread block.
#pragma once

#include <cmath>

#include "../kernels/checks.h"
#include "../kernels/element.h"
#include "../kernels/online_softmax.cuh"
#include "../kernels/page_layout.h"
#include "common/cuda/model/scalars.cuh"
#include "common/cuda/runtime/launch.h"
#include "ladder.h"

namespace stage7 {

using ElementVec = common::Vec16<Element>;  // 16 bytes: 8 elements

inline constexpr int kThreads = 128;
inline constexpr int kDimensions = 128;
inline constexpr int kBlockTokens = 16;
inline constexpr int kVecElements = ElementVec::kElements;
inline constexpr int kVecsPerRow = kDimensions / kVecElements;  // 16: what half a warp reads in one go

// The arguments of every kernel.
struct LadderCall {
  Pages pages;
  Batch batch;
  const Element* queries;  // [num_sequences, num_heads, kDimensions]
  Element* output;         // the same
  float scale;             // brings scores into units of log2(e): weights are powers of 2
};

inline void check_ladder(const PageShape& shape, const Batch& batch) {
  check_batch(kPlainKernels, shape, batch);
  COMMON_CHECK(shape.type == ScalarType::kBFloat16 && shape.head_dim == kDimensions && shape.block_size == kBlockTokens,
               "the ladder is for bfloat16, head_dim 128 and blocks of 16");
}

inline LadderCall ladder_call(const Pages& pages, const Batch& batch, const void* queries, void* output) {
  check_pages(kPlainKernels, pages);
  check_ladder(pages.shape, batch);
  COMMON_CHECK(batch.num_sequences == 0 || (is_aligned(queries) && is_aligned(output)),
               "queries and output begin at multiples of 16 bytes");
  COMMON_CHECK(batch.num_sequences < 1 << 16, "a grid has at most 65,535 sequences");
  const float scale = score_scale(kDimensions);
  return {pages, batch, static_cast<const Element*>(queries), static_cast<Element*>(output), scale};
}

// The longest context that the tables have room for. The host knows no more: the lengths are on the device.
inline int max_context(const Batch& batch) { return batch.max_blocks_per_sequence * kBlockTokens; }

// The size of the scores of all query heads, for the steps that keep them in memory.
inline std::size_t score_bytes(const PageShape& shape, const Batch& batch) {
  check_ladder(shape, batch);
  return sizeof(float) * static_cast<std::size_t>(batch.num_sequences) * static_cast<std::size_t>(batch.num_heads) *
         static_cast<std::size_t>(max_context(batch));
}

inline dim3 grid_of(int heads, int sequences, int splits = 1) {
  return {static_cast<unsigned>(heads), static_cast<unsigned>(sequences), static_cast<unsigned>(splits)};
}

// One kv head of one sequence: where its tokens are.
struct HeadPages {
  const Element* keys;
  const Element* values;
  const int* table;
  PageShape shape;
  int kv_head;

  __device__ __forceinline__ HeadPages(const LadderCall& call, int sequence, int head)
      : keys(static_cast<const Element*>(call.pages.keys)),
        values(static_cast<const Element*>(call.pages.values)),
        table(call.batch.block_table(sequence)),
        shape(call.pages.shape),
        kv_head(head) {
    shape.type = ScalarType::kBFloat16;  // check_ladder has checked it; the compiler computes addresses with it
    shape.head_dim = kDimensions;
    shape.block_size = kBlockTokens;
  }

  // Where vector `vec` of the token's row lies, in elements; the same in keys and in values.
  __device__ __forceinline__ std::int64_t vec_offset(int position, int vec) const {
    const int row = position % kBlockTokens;
    return row_offset(shape, table[position / kBlockTokens], kv_head, 0) +
           vec_place(kVecsPerRow, kBlockTokens, row, vec) * kVecElements;
  }
};

__device__ __forceinline__ ElementVec load_vec(const Element* address) {
  return {*reinterpret_cast<const uint4*>(address)};
}

// The query row of a head, or its row of the output.
__device__ __forceinline__ std::int64_t head_row(const LadderCall& call, int sequence, int head) {
  return (std::int64_t{sequence} * call.batch.num_heads + head) * kDimensions;
}

// Joins the parts of one query with a warp, and writes its row of the output.
__device__ __forceinline__ void write_output(const LadderCall& call, const PartialSoftmax<kDimensions>& parts,
                                             int num_parts, int query, std::int64_t row) {
  constexpr int kValues = kWarpValues<kDimensions>;
  const int dimension = static_cast<int>(threadIdx.x) % 32 * kValues;
  store_output(merge_parts<kValues>(parts, num_parts, query, dimension), call.output + row + dimension);
}

// One number from each thread, combined. All threads of the block call it.
template <typename Operation>
__device__ float over_thread_block(float own, Operation operation) {
  __shared__ float parts[kThreads];
  __syncthreads();  // threads may still read the numbers of an earlier call
  parts[threadIdx.x] = own;
  __syncthreads();
  float result = parts[0];
  for (int i = 1; i < kThreads; ++i) {
    result = operation(result, parts[i]);
  }
  return result;
}

}  // namespace
