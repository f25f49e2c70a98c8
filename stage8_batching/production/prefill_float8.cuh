// prefill_kernel.cuh's kernel for pages in float8. Tensor cores multiply bfloat16, so pages are copied into a place of
// their own, and the warps of warpgroup 0 convert them from there to bfloat16, scales included, into the rings. For
// that warpgroup 0 needs 72 registers a thread, and leaves 216 to the others, for which nothing else changes.
#pragma once

#include <cstdint>

#include "float8.cuh"
#include "prefill_kernel.cuh"

namespace stage8 {

// One tile of K and of V as the pages have it, in four parts: each warp copies its own part, and reads no other part.
template <int kHeadDim>
struct Float8Tiles {
  using Stored = SharedTile<kHeadDim, ScalarType::kFloat8>;
  static constexpr int kWarps = common::kWarpgroupThreads / 32;
  static constexpr int kPieces = PrefillShape<kHeadDim>::kTokens / kTileRows / kWarps;
  static constexpr int kPieceBytes = Stored::kPair.value_scales;  // K and its scales; V's scales and V
  alignas(128) unsigned char bytes[kWarps][2][kPieces * kPieceBytes];
  std::uint64_t full[kWarps][2];
};

template <int kHeadDim>
struct Float8PrefillShared : PrefillShared<kHeadDim> {
  Float8Tiles<kHeadDim> stored;
};

#if COURSE_WGMMA

// In place of TileCopier: copies and then converts.
template <int kHeadDim>
struct TileConverter {
  using Shape = PrefillShape<kHeadDim>;
  static constexpr int kPieces = Float8Tiles<kHeadDim>::kPieces;
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;

  const PrefillCall& call;
  Float8PrefillShared<kHeadDim>& shared;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_piece = warp * kPieces;  // this warp's
  common::RingPosition<Shape::kStages> stage;
  int stored_parity = 0;

  // Copies K or V of this warp's part of a tile: `own` pieces; offset is where lane i's piece begins.
  __device__ __forceinline__ void fetch(bool is_key, std::int64_t offset, int own) const {
    constexpr int kBytes = Float8Tiles<kHeadDim>::kPieceBytes;
    const int which = is_key ? 0 : 1;
    const std::uint32_t full = common::shared_address(&shared.stored.full[warp][which]);
    if (lane == 0) {
      common::arrive_expecting(full, own * kBytes);
    }
    __syncwarp();
    if (lane < own) {
      common::copy_bulk(common::shared_address(shared.stored.bytes[warp][which]) + lane * kBytes,
                        static_cast<const std::uint8_t*>(call.pages.keys) + offset + (is_key ? 0 : kBytes), kBytes,
                        full);
    }
  }

  // Waits for that copy, and converts it into a tile of the ring.
  __device__ __forceinline__ void convert(bool is_key, int own, std::uint64_t& empty) const {
    using Stored = SharedTile<kHeadDim, ScalarType::kFloat8>;
    const int which = is_key ? 0 : 1;
    const unsigned char* pieces = shared.stored.bytes[warp][which];
    unsigned char* tile = is_key ? shared.keys[stage.place] : shared.values[stage.place];
    common::wait_barrier(common::shared_address(&shared.stored.full[warp][which]), stored_parity);
    common::wait_barrier(common::shared_address(&empty), stage.parity ^ 1);
#pragma unroll 4
    for (int i = lane; i < own * kTileRows * Stored::kVecs; i += 32) {
      const int row = i / Stored::kVecs;
      const unsigned char* piece = pieces + row / kTileRows * Float8Tiles<kHeadDim>::kPieceBytes;
      const int row_in_piece = row % kTileRows;
      // i is the place in the piece, so that neighbouring threads read neighbouring vectors.
      const int vec = swizzle(Stored::kPanelVecs, row_in_piece, i % Stored::kVecs);
      uint4 vecs[2];
      constexpr int kValuesInPiece = Stored::kPair.values - Stored::kPair.value_scales;
      to_bfloat16(
          vecs, reinterpret_cast<const uint4*>(piece + (is_key ? 0 : kValuesInPiece))[i % (kTileRows * Stored::kVecs)],
          scale_of(piece[(is_key ? Stored::kPair.key_scales : 0) + row_in_piece]));
      unsigned char* to = tile + vec / 4 * Shape::kPanelBytes + (first_piece * kTileRows + row) * Shape::kRowBytes;
      const int place = vec % 4 * 2 ^ row % 8;
      *reinterpret_cast<uint4*>(to + place * kVecBytes) = vecs[0];
      *reinterpret_cast<uint4*>(to + (place ^ 1) * kVecBytes) = vecs[1];
    }
  }

  __device__ __forceinline__ void load(const int* table, int kv_head, int first_token, int num_seen) {
    const int block_size = call.pages.shape.block_size;
    int token = (num_seen - 1) / Shape::kTokens * Shape::kTokens + (first_piece + lane % kPieces) * kTileRows;
    int block = token < num_seen ? table[token / block_size] : 0;
    const auto offset = [&] { return row_offset(call.pages.shape, block, kv_head, token % block_size); };
    int own = max(0, min(kPieces, ((num_seen - 1) % Shape::kTokens + kTileRows) / kTileRows - first_piece));
    fetch(true, offset(), own);
    fetch(false, offset(), own);
    while (token >= first_token) {
      token -= Shape::kTokens;
      if (token >= first_token) {
        block = table[token / block_size];
      }
#pragma unroll
      for (const bool is_key : {true, false}) {
        convert(is_key, own, is_key ? shared.keys_empty[stage.place] : shared.values_empty[stage.place]);
        // The tensor cores read what these stores wrote, and the copy engine overwrites what these loads read.
        common::fence_copy_engine();
        __syncwarp();
        if (lane == 0) {
          common::arrive(
              common::shared_address(is_key ? &shared.keys_full[stage.place] : &shared.values_full[stage.place]));
        }
        if (token >= first_token) {
          fetch(is_key, offset(), kPieces);
        }
      }
      own = kPieces;
      stored_parity ^= 1;
      stage.advance();
    }
  }
};

#endif  // COURSE_WGMMA

template <int kHeadDim>
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
  prefill_block<kHeadDim, TileConverter<kHeadDim>>(call, shared);
#endif
}

}  // namespace
