// The sizes of ragged attention's thread blocks, in its kernels for mma.
#pragma once

#include <cstddef>

#include "common/paged/page_shape.h"

namespace common {

// The sizes of a thread block's work.
struct RaggedTile {
  int warps;
  int rows_per_warp;  // query rows; an mma multiplies 16
  int tokens;         // of a tile of K, and of V
  int stages;         // tiles in shared memory
  int resident;       // thread blocks that a multiprocessor holds at once

  COURSE_HOST_DEVICE constexpr int rows() const { return warps * rows_per_warp; }
};

// There are two shapes. For long prompts, a warp has 32 rows and multiplies every vector of K and V that it fetches
// from shared memory with two blocks of 16 rows; the output of 32 rows of 128 dimensions takes half of the registers,
// so a multiprocessor holds two thread blocks. Short prompts end after a few tiles: with fewer rows a warp, more thread
// blocks wait for their first tile at the same time, and fewer rows of a diagonal tile see nothing. For 256 dimensions,
// both have the same rows, and the short one is for thread blocks that can have 99 KB of shared memory.
constexpr RaggedTile ragged_tile(int head_dim, bool is_short) {
  if (head_dim > 128) {
    return {4, 16, is_short ? 32 : 64, 2, 1};
  }
  return is_short ? RaggedTile{4, 16, 32, 2, 4} : RaggedTile{4, 32, 64, 2, 2};
}

// The rows of a task of the kernel for wgmma (prefill_kernel.cuh), the tokens of its tiles, and how long rows may be
// for its form for float8 pages (prefill_float8.cuh).
inline constexpr int kWarpgroupsTaskRows = 128;
constexpr int warpgroups_tile_tokens(int head_dim) { return head_dim > 128 ? 64 : 128; }
inline constexpr int kMaxFloat8PrefillHeadDim = 128;

// How long rows may be where sequences read a shared prefix together (shared_plan.h).
inline constexpr int kMaxSharingHeadDim = 128;

// The shared memory of one thread block, its static arrays included: queries, tiles of K and of V, a barrier for each.
constexpr std::size_t ragged_shared_bytes(int head_dim, bool is_short) {
  const RaggedTile tile = ragged_tile(head_dim, is_short);
  const int bytes = 2 * head_dim * (tile.rows() + 2 * tile.stages * tile.tokens) + 2 * tile.stages * 8;
  return static_cast<std::size_t>(bytes);
}

}  // namespace common
