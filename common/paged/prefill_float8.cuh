// prefill_kernel.cuh's kernel for pages in float8. Tensor cores multiply bfloat16, so pages are copied into a place of
// their own, and the warps of warpgroup 0 convert them from there to bfloat16, scales included, into the rings. For
// that warpgroup 0 needs 72 registers a thread, and leaves 216 to the others, for which nothing else changes.
//
// At the tensor cores' full rate, the products of 128 rows of queries with a tile of 128 tokens take 2,048 cycles.
// Beside them, for heads of 128 dimensions:
//
// - Each of the four warps, one on each scheduler, converts 8,192 numbers: 256 for a thread, 2 instructions for each
//   (float8.cuh), and some 200 for the rest. A scheduler starts one instruction a cycle, so there is time for them.
// - Shared memory moves 128 bytes a cycle. The products fetch 160 KB, 1,280 cycles. K and V come as 32 KB, are loaded,
//   and are stored as 64 KB, 1,024 cycles. It comes close, and no load or store may have bank conflicts.
//
// Latency remains, since no other warp of the scheduler converts while this one waits. So a warp loads its part of K or
// V whole before it converts the first number, and at once starts to copy its part of the next tile, which then has a
// whole tile's time.
#pragma once

#include <cstdint>

#include "common/paged/float8.cuh"
#include "common/paged/prefill_kernel.cuh"

namespace common {

// One tile of K and of V as the pages have it. Each warp has pieces of its own, 16 rows each, and reads no others.
template <int kHeadDim>
struct Float8Tiles {
  using Stored = SharedTile<kHeadDim, ScalarType::kFloat8>;
  static constexpr int kWarps = common::kWarpgroupThreads / 32;
  static constexpr int kPieces = PrefillShape<kHeadDim>::kTokens / kTileRows / kWarps;
  static constexpr int kPieceBytes = Stored::kPair.value_scales;  // K and its scales; V's scales and V
  alignas(128) unsigned char bytes[kWarps][2][kPieces][kPieceBytes];
  std::uint64_t full[kWarps][2];
};

template <int kHeadDim>
struct Float8PrefillShared : PrefillShared<kHeadDim> {
  Float8Tiles<kHeadDim> stored;
};

#if COURSE_BULK_COPY

// In place of TileCopier: copies and then converts, K of a tile and then V. It is compiled where there is no wgmma too:
// a test runs it there.
template <int kHeadDim, bool kHasWindows>
struct TileConverter {
  using Shape = PrefillShape<kHeadDim>;
  using Tiles = Float8Tiles<kHeadDim>;
  using Stored = SharedTile<kHeadDim, ScalarType::kFloat8>;
  static constexpr bool kWindows = kHasWindows;
  static constexpr int kPieces = Tiles::kPieces;
  static constexpr int kVecs = kTileRows * Stored::kVecs / 32;  // the vectors of a piece that a thread converts
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static constexpr int kPrefixLowered = kFloat8PrefixLowered;
  static constexpr int kOrderedAtOnce = 8;  // with 4, the consumers' products do not overlap (ptxas of CUDA 13.0)

  const PrefillCall& call;
  Float8PrefillShared<kHeadDim>& shared;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Which vectors a thread converts: four neighbouring threads have four neighbouring vectors, and the next four
  // threads have four of another row. Eight threads access shared memory in one cycle. So the two rows are chosen for
  // the loads of these eight to lie in different banks, and for their stores too: they store every other vector of a
  // row, so one row is even and one is odd. And rows of 128 bytes differ in bit 2, which exchanges the halves of a row
  // (page_layout.h).
  const int row = kHeadDim == 128 ? lane / 8 ^ (lane / 4 % 2 == 0 ? 0 : 5) : lane / 4;  // and the one 8 rows below
  const int vec = lane % 4;                                                             // and the one 4 further
  common::RingPosition<Shape::kStages> stage;
  int stored_parity = 0;

  // The pieces that a warp has of the tiles of a piece of work, from the last tile to the first. The lanes look up
  // where pieces begin, one each, for 16 tiles at once; a tile is copied by the lanes that have its pieces.
  struct Pieces {
    static constexpr int kTilesAtOnce = 32 / kPieces;
    const PageShape& shape;
    const int* table;
    int kv_head;
    int first_seen;
    int num_seen;
    int token;  // where this lane's piece begins
    std::int64_t offset;

    __device__ __forceinline__ void look_up() {
      if (token >= 0 && token < num_seen) {
        const int block = table[token_looked_up<kWindows>(token, first_seen) / shape.block_size];
        offset = row_offset(shape, block, kv_head, token % shape.block_size);
      }
      token -= kTilesAtOnce * Shape::kTokens;
    }
  };

  // Copies K (0) or V (1) of this warp's part of the i-th tile: `own` pieces.
  __device__ __forceinline__ void fetch(const Pieces& pieces, int which, int i, int own) const {
    constexpr int kBytes = Tiles::kPieceBytes;
    const std::uint32_t full = common::shared_address(&shared.stored.full[warp][which]);
    if (lane == 0) {
      common::arrive_expecting(full, own * kBytes);
    }
    __syncwarp();
    if (lane / kPieces == i % Pieces::kTilesAtOnce && lane % kPieces < own) {
      common::copy_bulk(common::shared_address(shared.stored.bytes[warp][which][lane % kPieces]),
                        static_cast<const std::uint8_t*>(call.pages.keys) + pieces.offset + which * kBytes, kBytes,
                        full);
    }
  }

  // A thread's part of a piece: vectors of two rows, and the rows' scales.
  struct Part {
    uint4 vecs[2][kVecs / 2];
    std::uint32_t scales[2];
  };

  __device__ __forceinline__ void load_part(Part& part, int which, int number) const {
    constexpr int kFirstValue = Stored::kPair.values - Stored::kPair.value_scales;
    const unsigned char* piece = shared.stored.bytes[warp][which][number];
    const unsigned char* scales = piece + (which == 0 ? Stored::kPair.key_scales : 0) + row;
    const unsigned char* rows = piece + which * kFirstValue;
    const int place = row * Stored::kPanelRowBytes + swizzle(Stored::kPanelVecs, row, vec) * kVecBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      part.scales[half] = scales[half * 8];
#pragma unroll
      for (int i = 0; i < kVecs / 2; ++i) {
        part.vecs[half][i] =
            *reinterpret_cast<const uint4*>(rows + half * 8 * Stored::kPanelRowBytes + (place ^ i * 4 * kVecBytes));
      }
    }
  }

  // Converts the parts of the first `own` pieces into a tile of the ring.
  template <bool kAnyScale>
  __device__ __forceinline__ void store_parts(const Part (&parts)[kPieces], int own, unsigned char* tile) const {
    const int place = (warp * kPieces * kTileRows + row) * Shape::kRowBytes + (vec * 2 ^ row % 8) * kVecBytes;
#pragma unroll
    for (int number = 0; number < kPieces; ++number) {
      if (number < own) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < kVecs / 2; ++i) {
            uint4 vecs[2];
            to_bfloat16<kAnyScale>(vecs, parts[number].vecs[half][i], parts[number].scales[half]);
            unsigned char* rows = tile + i * Shape::kPanelBytes + (number * kTileRows + half * 8) * Shape::kRowBytes;
            *reinterpret_cast<uint4*>(rows + place) = vecs[0];
            *reinterpret_cast<uint4*>(rows + (place ^ kVecBytes)) = vecs[1];
          }
        }
      }
    }
  }

  // See TileCopier::load.
  __device__ __forceinline__ void load(const int* table, int kv_head, int first_seen, int num_seen) {
    const int last_tile = (num_seen - 1) / Shape::kTokens;
    const int first_piece = warp * kPieces;
    Pieces pieces{call.pages.shape,
                  table,
                  kv_head,
                  first_seen,
                  num_seen,
                  (last_tile - lane / kPieces) * Shape::kTokens + (first_piece + lane % kPieces) * kTileRows,
                  0};
    pieces.look_up();
    int own = max(0, min(kPieces, ((num_seen - 1) % Shape::kTokens + kTileRows) / kTileRows - first_piece));
    fetch(pieces, 0, 0, own);
    fetch(pieces, 1, 0, own);
    const int num_tiles = last_tile + 1 - first_seen / Shape::kTokens;
    for (int next = 1; next <= num_tiles; ++next) {
      if (next % Pieces::kTilesAtOnce == 0) {
        pieces.look_up();
      }
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        Part parts[kPieces];
        common::wait_barrier(common::shared_address(&shared.stored.full[warp][which]), stored_parity);
        std::uint32_t largest_scale = 0;
#pragma unroll
        for (int number = 0; number < kPieces; ++number) {
          load_part(parts[number], which, number);  // a piece that does not exist holds anything, and is not stored
          largest_scale = max(largest_scale, max(parts[number].scales[0], parts[number].scales[1]));
        }
        if (next < num_tiles) {
          common::fence_copy_engine();  // the copy engine overwrites what these loads have read
          __syncwarp();
          fetch(pieces, which, next, kPieces);
        }
        std::uint64_t& empty = which == 0 ? shared.keys_empty[stage.place] : shared.values_empty[stage.place];
        std::uint64_t& full = which == 0 ? shared.keys_full[stage.place] : shared.values_full[stage.place];
        unsigned char* tile = which == 0 ? shared.keys[stage.place] : shared.values[stage.place];
        common::wait_barrier(common::shared_address(&empty), stage.parity ^ 1);
        if (__all_sync(~0U, largest_scale <= kMaxFactorScale)) {
          store_parts<false>(parts, own, tile);
        } else {
          store_parts<true>(parts, own, tile);
        }
        common::fence_copy_engine();  // the tensor cores read what these stores wrote
        __syncwarp();
        arrive_as_warp(full, lane);
      }
      own = kPieces;
      stored_parity ^= 1;
      stage.advance();
    }
  }
};

#endif  // COURSE_BULK_COPY

template <int kHeadDim, bool kWindows, bool kOrdered = false>
__global__ void __launch_bounds__(PrefillShape<kHeadDim>::kThreads, 1)
    prefill_float8_kernel(const __grid_constant__ PrefillCall call) {
#if COURSE_WGMMA
  COURSE_DYNAMIC_SHARED(1024, memory);
  auto& shared = *reinterpret_cast<Float8PrefillShared<kHeadDim>*>(memory);
  if (threadIdx.x == 0) {
    init_barriers(shared);
    for (auto& of_warp : shared.stored.full) {
      common::init_barrier(common::shared_address(&of_warp[0]), 1);
      common::init_barrier(common::shared_address(&of_warp[1]), 1);
    }
    common::fence_barrier_init();
  }
  prefill_block<kHeadDim, TileConverter<kHeadDim, kWindows>, kOrdered>(call, shared);
#endif
}

}  // namespace common
