// Where an element of K or V lies. All kernels of this folder ask the functions of this file.
//
// Pages are [num_blocks, num_kv_heads, block_size, head_dim]. A row is one token's K or V of one head. One head's part
// of a block is where a stage's plain kernels have it; inside of it, rows have an order of their own.
#pragma once

#include <cstdint>

#include "common/paged/page_shape.h"

namespace common {

// Where a row begins, in elements from the beginning of the layer's keys or values. A row has elements_per_row()
// elements, which is head_dim except in float8. (Where rows come in tiles, it is asked for the first row of a tile, and
// says where the tile begins.)
COURSE_HOST_DEVICE std::int64_t row_offset(const PageShape& shape, std::int64_t block, int kv_head, int row) {
  return ((block * shape.num_kv_heads + kv_head) * shape.block_size + row) * shape.elements_per_row();
}

// ---- tiles, panels and swizzles: for tensor cores and the copy engine (the end of stage 7's second page) ----------
//
// Inside one head's part of a block, 16-bit rows come in tiles of 16. A tile of rows of 256 bytes, 128 dimensions, is
// cut into two panels, columns of 128 bytes: [tile][panel][16 rows][128 bytes]. A panel's row is 8 vectors of 16 bytes,
// and vector p of row r is stored at place p ^ r % 8: a swizzle, as it is called. Rows of 512 bytes are four panels,
// and rows of any other length one. With 128 dimensions and 16 tokens a block:
//
//     panel 0: dimensions 0-63                 panel 1: dimensions 64-127
//     row 0    0 1 2 3 4 5 6 7                 row 0    8  9 10 11 12 13 14 15      2 KB each; one after the other
//     row 1    1 0 3 2 5 4 7 6                 row 1    9  8 11 10 13 12 15 14
//     row 2    2 3 0 1 6 7 4 5                 …
//     …        (row 15 is like row 7)
//
// Why the swizzle: attention copies pages into shared memory as they are, and tensor cores then read the same vector of
// 8 consecutive rows at once. Shared memory has 32 banks of 4 bytes, so 8 vectors come in one cycle only if they lie in
// different 16-byte columns of the 128 bytes that the banks span. Unswizzled, they all lie in the same column, which
// takes 8 cycles (on an H200, attention over 32 sequences of 32,768 tokens takes 1.43 times as long without it).
//
// Why panels: Hopper's wgmma reads whole matrices out of shared memory by itself, and knows no rows longer than 128
// bytes. A panel is what wgmma calls a tile with 128-byte swizzle, so a plain copy of 2 KB brings it in the layout that
// wgmma reads (prefill_kernel.cuh). Decode copies both panels, 4 KB, at once: panels make no difference to it.
//
// All of that costs little: the code that writes a row knows the row's number.
//
// A float8 row has half as many vectors, and a scale of one byte (float8.cuh). With 128 dimensions, K of a tile would
// be 2 KB and 16 bytes: a copy would be half as long as in bfloat16, and seven of eight copies would begin inside one
// of the memory's 128-byte lines. So K and V of a tile lie together, for one copy, and tiles begin on multiples of 128
// bytes:
//
//     K, 16 rows: 2,048 bytes | K's 16 scales | V's 16 scales | V, 16 rows: 2,048 bytes | 96 bytes of nothing
//
// (Measured on an H200, 32 sequences of 8,192 tokens, only copying: 137 us apart, 131 together and aligned.) Smaller
// heads are aligned to head_dim bytes. Scales and alignment cost 3 % together, and half of it with 256 dimensions.

inline constexpr int kVecBytes = 16;
inline constexpr int kTileRows = 16;

// Rows of a tile: 16, or 8 where blocks are not cut into tiles of 16. Tensor cores read neither float32 nor blocks of
// other sizes: there each row is a tile of its own, and rows lie in the plain order.
COURSE_HOST_DEVICE int rows_per_tile(const PageShape& shape) {
  const bool has_tiles = shape.type != ScalarType::kFloat32 && shape.block_size % 8 == 0;
  return !has_tiles ? 1 : shape.block_size % kTileRows == 0 ? kTileRows : 8;
}

// Only rows of 256 bytes (head_dim 128 at 16 bits, 256 at 8) and of 512 (256 at 16) are cut. A row of 128 bytes is a
// panel as it is. wgmma reads no other length: rows of other lengths are one panel as wide as the row.
COURSE_HOST_DEVICE constexpr int vecs_per_panel(int vecs_per_row) {
  return vecs_per_row == 16 || vecs_per_row == 32 ? 8 : vecs_per_row;
}

// What the place of a vector is XORed with. Rows of 128, 256, 384 … bytes all begin in bank 0: the mask is the row's
// number modulo 8. Rows of 64 or 192 bytes begin in banks 0 and 16 alternately, so pairs of rows need 4 masks, which
// also keep a vector inside its row of 4 or 12. Four consecutive rows of 32 or 96 bytes begin in four different banks,
// and two masks are enough. Rows 8 apart have the same mask.
COURSE_HOST_DEVICE int swizzle_mask(int vecs_per_row, int row) {
  return vecs_per_row % 8 == 0   ? row & 7
         : vecs_per_row % 4 == 0 ? (row >> 1) & 3
         : vecs_per_row % 2 == 0 ? (row >> 2) & 1
                                 : 0;
}

// The place of vector `vec` of row `row` inside the row of a panel, in vectors.
COURSE_HOST_DEVICE int swizzle(int vecs_per_row, int row, int vec) { return vec ^ swizzle_mask(vecs_per_row, row); }

// The same place, counted from where the head's part of the block begins. tile_rows is a power of 2.
COURSE_HOST_DEVICE int vec_place(int vecs_per_row, int tile_rows, int row, int vec) {
  const int panel_vecs = vecs_per_panel(vecs_per_row);
  const int row_in_tile = row & (tile_rows - 1);
  const int vec_in_panel = panel_vecs < vecs_per_row ? vec & 7 : vec;
  return (row - row_in_tile) * vecs_per_row + (vec - vec_in_panel) * tile_rows + row_in_tile * panel_vecs +
         swizzle(panel_vecs, row_in_tile, vec_in_panel);
}

// The same place in vectors from where the layer's keys or values begin, for kernels that move vectors one by one. For
// pages of float32 and bfloat16.
struct PageVecs {
  int vecs_per_row;
  int num_kv_heads;
  int block_size;
  int tile_rows;

  COURSE_HOST_DEVICE std::int64_t place(std::int64_t block, int kv_head, int row, int vec) const {
    const std::int64_t first_row = (block * num_kv_heads + kv_head) * block_size;
    return first_row * vecs_per_row + vec_place(vecs_per_row, tile_rows, row, vec);
  }
};

COURSE_HOST_DEVICE PageVecs page_vecs(const PageShape& shape) {
  return {.vecs_per_row = shape.head_dim * bytes_of(shape.type) / kVecBytes,
          .num_kv_heads = shape.num_kv_heads,
          .block_size = shape.block_size,
          .tile_rows = rows_per_tile(shape)};
}

// K and V of a tile of 16 rows, one after the other, in bytes from where K begins. They lie so in shared memory, and
// also in the pages if the pages hold float8. Between K and V, float8 has K's scales and then V's scales, a byte for
// each row.
struct PairLayout {
  int key_scales;
  int value_scales;
  int values;
  int bytes;
};
COURSE_HOST_DEVICE constexpr PairLayout pair_layout(ScalarType type, int head_dim) {
  const bool is_float8 = type == ScalarType::kFloat8;
  const int matrix_bytes = kTileRows * head_dim * (is_float8 ? 1 : 2);
  const int scale_bytes = is_float8 ? kTileRows : 0;
  return {.key_scales = matrix_bytes,
          .value_scales = matrix_bytes + scale_bytes,
          .values = matrix_bytes + 2 * scale_bytes,
          .bytes = 2 * (matrix_bytes + scale_bytes)};
}
// The size of a pair's place in shared memory: a copy is faster if both ends begin at multiples of 128 bytes.
COURSE_HOST_DEVICE constexpr int pair_place_bytes(ScalarType type, int head_dim) {
  return (pair_layout(type, head_dim).bytes + 127) / 128 * 128;
}

// A tile of 16 rows in shared memory, for code that steps through a row by two vectors, 16 dimensions (float8: 32):
// because the swizzle is an XOR, a step inside a panel is an XOR of the address.
template <int kHeadDim, ScalarType kType = ScalarType::kBFloat16>
struct SharedTile {
  static constexpr int kVecs = kHeadDim / (kType == ScalarType::kFloat8 ? 16 : 8);
  static constexpr int kPanelVecs = vecs_per_panel(kVecs);
  static constexpr int kPanelRowBytes = kPanelVecs * kVecBytes;
  static constexpr int kPanelBytes = kTileRows * kPanelRowBytes;
  static constexpr int kPanels = kVecs / kPanelVecs;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static constexpr PairLayout kPair = pair_layout(kType, kHeadDim);
  static_assert(kPair.key_scales == kBytes);

  // Where a panel of a tile with tile_rows rows begins, in elements of the pages, from where row_offset points.
  static COURSE_HOST_DEVICE constexpr int panel_offset(int panel, int tile_rows) {
    return panel * tile_rows * (kPanelRowBytes / (kType == ScalarType::kFloat8 ? 1 : 2));
  }
  // The offset in bytes of the row's first or second vector: `place` bytes behind row_begin.
  static COURSE_HOST_DEVICE constexpr int row_begin(int row) { return row * kPanelRowBytes; }
  static COURSE_HOST_DEVICE std::uint32_t place(int row, int vec) {
    return static_cast<std::uint32_t>(swizzle(kPanelVecs, row, vec) * kVecBytes);
  }
  // The same place, `step` steps of two vectors further.
  static COURSE_HOST_DEVICE std::uint32_t at_step(std::uint32_t place, int step) {
    return step / (kPanelVecs / 2) * kPanelBytes + (place ^ (step % (kPanelVecs / 2) * 2 * kVecBytes));
  }
};

}  // namespace common
