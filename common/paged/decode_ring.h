// The host's rule for the sizes of decode attention's thread blocks and rings.
#pragma once

#include <cstddef>

#include "common/paged/page_layout.h"
#include "common/paged/paged_kernels.h"

namespace common {

// With less than about 100 KB of copies in flight, a multiprocessor does not reach its share of the memory's bandwidth
// (measured on an H200); with more in flight, it may pause now and then. All of its shared memory goes into rings,
// except what the exchange of partial results needs (decode_merge.cuh): 8 queries at a time.
struct DecodeRing {
  int warps;     // of a thread block
  int stages;    // tiles in flight for each warp
  int resident;  // thread blocks that a multiprocessor holds at once
};

// many_heads: there are more heads than multiprocessors, so that few heads are cut. Otherwise a head's result is put
// together from many shares, and a multiprocessor has one large thread block instead of two small ones: there are fewer
// partial results to merge, and more threads to merge them.
constexpr DecodeRing decode_ring(ScalarType type, int head_dim, int group, bool many_heads) {
  const bool is_float8 = type == ScalarType::kFloat8;
  if (head_dim == 256) {
    return {4, is_float8 ? 4 : 2, 1};  // tiles of 16 KB: 128 KB, and up to 33 KB for the exchange
  }
  const int stages = 256 / head_dim;  // this number of tiles is 16 KB (for 96: 12)
  if (is_float8) {
    // A tile has half the bytes, and more work for each byte. Many warps with few tiles each were fastest (32 sequences
    // of 8,192 tokens: 146 us with 5 warps and 4 tiles, 138 with 8 and 2).
    return many_heads ? DecodeRing{group > 8 ? 6 : 8, stages, 2} : DecodeRing{group > 8 ? 8 : 10, 2 * stages, 1};
  }
  if (group > 8) {  // a thread needs more registers: fewer warps, and more tiles for each warp
    return many_heads ? DecodeRing{4, 3 * stages / 2, 2} : DecodeRing{8, 3 * stages / 2, 1};  // 192 KB
  }
  return many_heads ? DecodeRing{5, stages, 2} : DecodeRing{10, stages, 1};  // 160 KB, and up to 42 for the exchange
}

// How many queries of a group exchange their partial results at the same time.
COURSE_HOST_DEVICE constexpr int exchanged_at_once(int group) { return group < 8 ? group : 8; }

// The shared memory of one thread block, its static arrays included: its rings, the exchange, a barrier for each tile
// of the rings, and the flag that it is the last contributor of a head.
constexpr std::size_t decode_shared_bytes(const DecodeRing& ring, ScalarType type, int head_dim, int group) {
  const int tile_bytes = pair_place_bytes(type, head_dim);  // K and V of 16 tokens
  const int row_bytes = (head_dim + 4) * 4 + 8;             // of one query in the exchange
  const int bytes = ring.warps * (ring.stages * tile_bytes + exchanged_at_once(group) * row_bytes);
  const int barriers = ring.warps * ring.stages * 8;
  const int bytes_in_all = bytes + barriers + 8;
  return static_cast<std::size_t>(bytes_in_all);
}

// The rings on chips with 99 KB of shared memory for a thread block, and one thread block on a multiprocessor: the
// rings for many heads where these fit for every group of up to 8, or up to 16, and else smaller ones. These chips need
// few copies in flight: in the 600 ns that a copy takes, a multiprocessor's share of the memory's bandwidth is 3 KB on
// an L4, 5 KB on an RTX 4090 and 7 KB on an RTX 3090. (On an H200 it is 21 KB.)
inline constexpr std::size_t kSmallSharedBytes = std::size_t{99} << 10;

constexpr DecodeRing small_decode_ring(ScalarType type, int head_dim, int group) {
  const DecodeRing usual = decode_ring(type, head_dim, group, true);
  if (decode_shared_bytes(usual, type, head_dim, group > 8 ? 16 : 8) <= kSmallSharedBytes) {
    return usual;
  }
  const bool is_float8 = type == ScalarType::kFloat8;
  if (head_dim == 256) {
    return is_float8 ? DecodeRing{4, 2, 1} : DecodeRing{2, 2, 1};  // 64 KB
  }
  return {is_float8 ? 6 : 4, 256 / head_dim, 1};  // 48 or 64 KB
}

}  // namespace common
