// Loads tiles of K and V of one head into shared memory for ragged attention. All threads of the block wait for a tile
// together, and release it together.
//
// Float8 can't be copied as it is: threads load 16 bytes each, convert them to bfloat16, scale included, and store them
// where a copy would have put them. No later code depends on float8. No barrier in shared memory counts the bytes of
// such a tile: all threads have stored their part before they synchronize.
#pragma once

#include "common/cuda/ptx.cuh"
#include "common/paged/element.h"
#include "common/paged/float8.cuh"
#include "common/paged/ragged_plan.h"
#include "common/paged/windows.cuh"

namespace common {

template <int kHeadDim, bool kShort>
struct RaggedShared {
  static constexpr RaggedTile kTile = RaggedTileOf<kHeadDim, kShort>::kTile;
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kQueryBytes = kTile.rows() * kRowBytes;
  static constexpr int kTileBytes = kTile.tokens * kRowBytes;  // a tile of K, or of V
  static constexpr int kBytes = kQueryBytes + 2 * kTile.stages * kTileBytes;
};

// Tile i has the tokens from first_token + i * kTile.tokens on.
template <ScalarType kType, int kHeadDim, bool kShort, bool kWindows>
struct RaggedLoader {
  static constexpr bool kFloat8 = kType == ScalarType::kFloat8;
  using Shared = RaggedShared<kHeadDim, kShort>;
  using Panels = SharedTile<kHeadDim>;
  static constexpr RaggedTile kTile = RaggedTileOf<kHeadDim, kShort>::kTile;
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 32 * kTile.warps;
  const Pages& pages;
  const int* table;
  int kv_head;
  int first_token;         // a multiple of kTokens
  int num_hidden;          // tokens from there on that the thread block does not see: less than kTokens
  int num_tokens;          // how many there are from first_token on, those included
  std::uint32_t keys;      // [kStages] tiles
  std::uint32_t values;    // [kStages] tiles
  std::uint32_t barriers;  // [2 * kStages]: K's, then V's

  __device__ __forceinline__ int tokens_of(int tile) const { return min(kTokens, num_tokens - tile * kTokens); }

  __device__ __forceinline__ int block_of(int token, int block_size) const {
    return table[token_looked_up<kWindows>(token, first_token + num_hidden) / block_size];
  }

  // Where blocks have 8 tokens: the tile's block number `part`. A tile begins with a block.
  __device__ __forceinline__ int short_block_of(int tile, int part) const {
    const int token = first_token + tile * kTokens;
    return kWindows ? block_of(token + part * 8, pages.shape.block_size) : table[token / 8 + part];
  }

  // All threads of the block call it.
  __device__ __forceinline__ void start_copy(int tile) const {
    const int stage = tile % kStages;
    const int block_size = pages.shape.block_size;
    const int count = tokens_of(tile);
    const std::uint32_t key_tile = keys + stage * Shared::kTileBytes;
    const std::uint32_t value_tile = values + stage * Shared::kTileBytes;
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (kFloat8) {
      return convert(tile, count, key_tile, value_tile);
    }
#if COURSE_BULK_COPY
    // In the first warp, a lane copies its block's part of K, then of V.
    if (thread < 32) {
      const std::uint32_t key_barrier = barriers + stage * 8;
      const std::uint32_t value_barrier = key_barrier + kStages * 8;
      if (thread == 0) {
        const int rows = min(block_size, kTileRows);
        const int bytes = (count + rows - 1) / rows * rows * Shared::kRowBytes;
        common::arrive_expecting(key_barrier, bytes);
        common::arrive_expecting(value_barrier, bytes);
      }
      __syncwarp();
      if (block_size < kTileRows) {
        // Panels of 8 rows fill halves of panels of 16.
        constexpr int kBytes = Panels::kPanelBytes / 2;
        for (int i = thread; i < (count + 7) / 8 * Panels::kPanels; i += 32) {
          const int part = i / Panels::kPanels;
          const int panel = i % Panels::kPanels;
          const std::int64_t offset = row_offset(pages.shape, short_block_of(tile, part), kv_head, 0) +
                                      Panels::panel_offset(panel, kTileRows / 2);
          const int place = part / 2 * Panels::kBytes + panel * Panels::kPanelBytes + part % 2 * kBytes;
          common::copy_bulk(key_tile + place, static_cast<const Element*>(pages.keys) + offset, kBytes, key_barrier);
          common::copy_bulk(value_tile + place, static_cast<const Element*>(pages.values) + offset, kBytes,
                            value_barrier);
        }
      } else if (thread * kTileRows < count) {
        const int token = first_token + tile * kTokens + thread * kTileRows;
        const std::int64_t offset = row_offset(pages.shape, block_of(token, block_size), kv_head, token % block_size);
        common::copy_bulk(key_tile + thread * Panels::kBytes, static_cast<const Element*>(pages.keys) + offset,
                          Panels::kBytes, key_barrier);
        common::copy_bulk(value_tile + thread * Panels::kBytes, static_cast<const Element*>(pages.values) + offset,
                          Panels::kBytes, value_barrier);
      }
    }
#else
    constexpr int kVecs = Panels::kVecs;
    const int tile_rows = rows_per_tile(pages.shape);
    for (int i = thread; i < count * kVecs; i += kThreads) {
      const int row = i / kVecs;
      const int token = first_token + tile * kTokens + row;
      const std::int64_t offset =
          row_offset(pages.shape, block_of(token, block_size), kv_head, 0) +
          vec_place(kVecs, tile_rows, token % block_size, i % kVecs) * (kVecBytes / static_cast<int>(sizeof(Element)));
      const int place = vec_place(kVecs, kTileRows, row, i % kVecs) * kVecBytes;
      common::copy_vec_async(key_tile + place, static_cast<const Element*>(pages.keys) + offset);
      common::copy_vec_async(value_tile + place, static_cast<const Element*>(pages.values) + offset);
    }
#endif
  }

  __device__ __forceinline__ void convert(int tile, int count, std::uint32_t key_tile, std::uint32_t value_tile) const {
    using Stored = SharedTile<kHeadDim, kType>;
    const int block_size = pages.shape.block_size;
    for (int i = static_cast<int>(threadIdx.x); i < count * Stored::kVecs; i += kThreads) {
      const int row = i / Stored::kVecs;
      const int vec = i % Stored::kVecs;
      const int row_in_tile = row % kTileRows;
      const int token = first_token + tile * kTokens + row - row_in_tile;
      const auto* pair = static_cast<const std::uint8_t*>(pages.keys) +
                         row_offset(pages.shape, block_of(token, block_size), kv_head, token % block_size);
      const int from = vec_place(Stored::kVecs, kTileRows, row_in_tile, vec) * kVecBytes;
#pragma unroll
      for (const bool is_key : {true, false}) {
        uint4 vecs[2];
        to_bfloat16(vecs, *reinterpret_cast<const uint4*>(pair + (is_key ? 0 : Stored::kPair.values) + from),
                    pair[(is_key ? Stored::kPair.key_scales : Stored::kPair.value_scales) + row_in_tile]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int place = vec_place(Panels::kVecs, kTileRows, row, 2 * vec + half) * kVecBytes;
          common::store_vec((is_key ? key_tile : value_tile) + place, vecs[half]);
        }
      }
    }
  }

  // All threads call it when they have read a tile; its place may then be overwritten. The tile was read with ordinary
  // loads, and the copy engine writes there next: the manual requires a fence between the two, in both directions (PTX
  // ISA 9.0, section 9.7.9.25.2, "Async Proxy").
  __device__ __forceinline__ void release() const {
#if COURSE_BULK_COPY
    common::fence_copy_engine();
#endif
    __syncthreads();
  }

  // Ends the group of copies that start_copy() has begun, or an empty one: wait_keys counts groups on older chips.
  __device__ __forceinline__ void commit() const {
#if !COURSE_BULK_COPY
    common::commit_copies();
#endif
  }

  __device__ __forceinline__ void wait_keys(int tile) const {
    if constexpr (kFloat8) {
      return __syncthreads();
    }
#if COURSE_BULK_COPY
    common::wait_barrier(barriers + tile % kStages * 8, tile / kStages % 2);
#else
    common::wait_copies<kStages - 1>();
    __syncthreads();
#endif
  }

  __device__ __forceinline__ void wait_values(int tile) const {
    if constexpr (kFloat8) {
      return;  // the values came with the keys
    }
#if COURSE_BULK_COPY
    common::wait_barrier(barriers + (kStages + tile % kStages) * 8, tile / kStages % 2);
#endif
  }

  // Whether a tile has rows that do not exist, or that no query sees; only asked where there are windows.
  __device__ __forceinline__ bool has_other_rows(int tile) const {
    return tokens_of(tile) < kTokens || (tile == 0 && num_hidden > 0);
  }

  // Sets the rows of V that do not exist, or that no query sees, to 0: their weights are 0 too, but 0 times a NaN would
  // be a NaN. Only the first and the last tile can have such rows; release() comes before a copy into their places.
  __device__ __forceinline__ void clear_values(int tile) const {
    const std::uint32_t value_tile = values + tile % kStages * Shared::kTileBytes;
    constexpr int kVecs = Panels::kVecs;
    if constexpr (kWindows) {
      const int first = tile == 0 ? num_hidden : 0;
      const int num_kept = tokens_of(tile) - first;
      for (int i = static_cast<int>(threadIdx.x); i < (kTokens - num_kept) * kVecs; i += kThreads) {
        const int row = i / kVecs + (i < first * kVecs ? 0 : num_kept);
        common::store_zeros(value_tile + vec_place(kVecs, kTileRows, row, i % kVecs) * kVecBytes);
      }
    } else {
      for (int i = tokens_of(tile) * kVecs + static_cast<int>(threadIdx.x); i < kTokens * kVecs; i += kThreads) {
        common::store_zeros(value_tile + vec_place(kVecs, kTileRows, i / kVecs, i % kVecs) * kVecBytes);
      }
    }
    __syncthreads();
  }
};

}  // namespace common
