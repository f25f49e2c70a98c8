// Where an element of K or V lies: the one place that knows, for all kernels.
//
// Pages are [num_blocks, num_kv_heads, block_size, head_dim]. A row (one token, one head) is a whole number of 16-byte
// vectors, and vector p of row r is stored at place p ^ mask(r): a swizzle, as it is called. Why: attention copies
// pages into shared memory as they are, and the tensor cores then read the same vector of 8 consecutive rows at once.
// Shared memory has 32 banks of 4 bytes, so 8 vectors come in one cycle only if they lie in different 16-byte columns
// of the 128 bytes that the banks span. Rows of 256 bytes put the same vector of all rows into the same column, which
// takes 8 cycles; the permutation spreads them over all 8 columns (measured on an H200, 32 sequences of 32,768 tokens:
// 1,425 us without it, 996 with it). It costs nothing: what writes a row knows its number.
#pragma once

#include <cstdint>

#include "kernels.h"

#ifdef __CUDACC__
#define COURSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define COURSE_HOST_DEVICE inline
#endif

namespace stage8 {

inline constexpr int kVecBytes = 16;

// What the place of a vector is XORed with. Rows of 128, 256, 384 … bytes all begin in bank 0: their number modulo 8
// does it. Rows of 64 or 192 bytes (head_dim 32 or 96 at 16 bits) begin in banks 0 and 16 by turns, so pairs of rows
// need 4 masks, which also keep a vector inside its row of 4 or 12. Rows 8 apart have the same mask. Other rows occur
// in float32 only, which is not read by tensor cores: they stay as they are.
COURSE_HOST_DEVICE int swizzle_mask(int vecs_per_row, int row) {
  return vecs_per_row % 8 == 0 ? row & 7 : vecs_per_row % 4 == 0 ? (row >> 1) & 3 : 0;
}

// In elements, from the beginning of the layer's keys or values.
COURSE_HOST_DEVICE std::int64_t row_offset(const PageShape& shape, std::int64_t block, int kv_head, int row) {
  return ((block * shape.num_kv_heads + kv_head) * shape.block_size + row) * shape.head_dim;
}

// The place of vector `vector` of row `row` inside the row, in vectors.
COURSE_HOST_DEVICE int swizzle(int vecs_per_row, int row, int vec) { return vec ^ swizzle_mask(vecs_per_row, row); }

}  // namespace
