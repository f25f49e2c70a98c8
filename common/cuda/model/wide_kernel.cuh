// A product for up to 128 tokens. As in the kernel by tiles (tiled_kernel.cuh), the copy engine fills a ring with
// panels of weights and of x, and wgmma multiplies them where they lie. But here tokens take the fixed side of 64, and
// rows of weights, up to 128, the variable side. So a thread's sums are neighbouring rows of one token, which are
// written together: unless a cluster shares a tile, sums are finished where they are, in registers.
//
// - Two threads have the copy engine fill the ring: a stage is 64 columns of a tile's rows, and of 64 or 128 rows
//   of x.
// - Two warpgroups multiply what has arrived, each for its 64 tokens.
// - A thread block has some tiles, one after the other; the ring goes on filling while a tile is finished. Where there
//   are fewer tiles than multiprocessors, a cluster of blocks shares a tile: each multiplies some of the columns, and
//   adds up all blocks' sums of some of the tokens, always in the same order.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/cuda/model/tile_pieces.cuh"

namespace common {

// kTileRows: the largest number of rows of a tile.
template <int kTileRows>
struct WideShape {
  static constexpr int kRows = kTileRows;
  static constexpr int kTokens = kMaxWideTokens;
  static constexpr int kComputeWarps = 8;
  static constexpr int kComputeThreads = 32 * kComputeWarps;
  static constexpr int kThreads = kComputeThreads + 128;  // a warpgroup more, which copies and finds scales
  static constexpr int kScaleThreads = 64;
  static constexpr int kStageColumns = kPanelColumns;
  static constexpr int kWeightBytes = kRows * kPanelRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kPanelRowBytes;
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kStages = (kSharedBytes - 1024 - 1024) / kStageBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  // A thread's sums: in each 8 rows, a pair of neighbours for each of two tokens.
  static constexpr int kSums = kRows / 2;
  // A piece is what a warp finishes at once: 64 rows of 8 tokens, 8 pairs in each of four lanes for a token.
  static constexpr int kPieces = kRows / 64 * 2;  // of a warp's sums
  static constexpr int kExchangeBytes = kComputeThreads * kSums * static_cast<int>(sizeof(float));
  static_assert(kExchangeBytes <= kRingBytes);
};

// The contents of shared memory behind the ring.
template <typename Shape>
struct WideMemory {
  float scales[Shape::kTokens];
  RingBarriers<Shape::kStages> barriers;
};

#if COURSE_WGMMA

// A warpgroup's tokens, times a tile's rows.
template <typename Shape>
__device__ __forceinline__ void multiply_wide_tile(const TileWork& work, std::uint32_t ring,
                                                   RingBarriers<Shape::kStages>& barriers,
                                                   RingPosition<Shape::kStages>& position,
                                                   float (&sums)[Shape::kSums]) {
  const std::uint32_t own_tokens = threadIdx.x / 128 * 64 * kPanelRowBytes;
  int multiplied = -1;  // the stage whose products are in flight
  const auto release = [&] {
    if (multiplied >= 0 && threadIdx.x % 128 == 0) {
      arrive(shared_address(&barriers.empty[multiplied]));
    }
  };
#pragma unroll 1
  for (int stage = work.first_stage; stage < work.last_stage; ++stage) {
    wait_barrier(shared_address(&barriers.full[position.place]), position.parity);
    const std::uint32_t weights = ring + static_cast<std::uint32_t>(position.place * Shape::kStageBytes);
    const std::uint64_t weights_at = panel_descriptor(weights);
    const std::uint64_t x_at = panel_descriptor(weights + Shape::kWeightBytes + own_tokens);
    fence_products();
#pragma unroll
    for (int step = 0; step < kPanelColumns / 16; ++step) {
      multiply_rows<Shape::kRows>(sums, x_at + step * kDescriptorStep, weights_at + step * kDescriptorStep,
                                  multiplied >= 0 || step > 0);
    }
    commit_products();
    wait_products<1>();
    release();
    multiplied = position.place;
    position.advance();
  }
  wait_products<0>();
  release();
  fence_registers(sums);
}

// What a lane finishes of a piece: pairs of rows first_row + 8 i and the next one, of one token. The lanes of a token
// are four neighbours, whose pairs alternate.
struct WidePiece {
  int token;
  int first_row;
  bool token_exists;
  int end_row;

  __device__ __forceinline__ int row(int i) const { return first_row + 8 * i; }
  __device__ __forceinline__ bool exists(int i) const { return token_exists && row(i) < end_row; }
  // The row with which the four lanes' pairs begin.
  __device__ __forceinline__ int begin() const { return first_row / 8 * 8; }
  // Whether all 64 rows exist, and lanes can store 16 neighbours of them at once.
  __device__ __forceinline__ bool is_whole() const { return begin() % 16 == 0 && begin() + 64 <= end_row; }
};

// In four neighbouring lanes: words[i] becomes lane i's words[this lane].
__device__ __forceinline__ void transpose_four(std::uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool is_upper = (threadIdx.x & static_cast<unsigned>(distance)) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) == 0) {
        std::uint32_t& lower = words[i];
        std::uint32_t& upper = words[i + distance];
        const std::uint32_t received = __shfl_xor_sync(0xFFFFFFFFU, is_upper ? lower : upper, distance);
        (is_upper ? lower : upper) = received;
      }
    }
  }
}

__device__ __forceinline__ std::uint32_t word_of(Pair<__nv_bfloat16> pair) {
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// Stores four lanes' pairs of a token, 16 rows for each lane. place_of(row): where the rows from `row` on belong.
template <typename PlaceOf>
__device__ __forceinline__ void store_pairs(const WidePiece& piece, const std::uint32_t (&pairs)[8],
                                            const PlaceOf& place_of) {
  std::uint32_t even[4] = {pairs[0], pairs[2], pairs[4], pairs[6]};
  std::uint32_t odd[4] = {pairs[1], pairs[3], pairs[5], pairs[7]};
  transpose_four(even);
  transpose_four(odd);
  if (piece.token_exists) {
    auto* const place = reinterpret_cast<uint4*>(place_of(piece.begin() + threadIdx.x % 4 * 16));
    place[0] = {even[0], even[1], even[2], even[3]};
    place[1] = {odd[0], odd[1], odd[2], odd[3]};
  }
}

template <typename Finish>
__device__ __forceinline__ void finish_pairs(const Finish& finish, const WidePiece& piece, const float4 (&loaded)[8],
                                             const float2 (&sums)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    finish(piece.exists(i), piece.token, piece.row(i), loaded[i], sums[i]);
  }
}

// A sum of squares is over a piece's 64 columns: a lane's, then four lanes'.
__device__ __forceinline__ void finish_pairs(const AddToResidual<__nv_bfloat16, kPanelColumns>& finish,
                                             const WidePiece& piece, const float4 (&loaded)[8],
                                             const float2 (&sums)[8]) {
  float squares = 0.0F;
  std::uint32_t pairs[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (piece.exists(i)) {
      const Pair<__nv_bfloat16> weighted = finish.add(piece.token, piece.row(i), loaded[i], sums[i], squares);
      pairs[i] = word_of(weighted);
      if (!piece.is_whole()) {
        *reinterpret_cast<Pair<__nv_bfloat16>*>(finish.weighted(piece.token, piece.row(i))) = weighted;
      }
    }
  }
  if (piece.is_whole()) {
    store_pairs(piece, pairs, [&](int row) { return finish.weighted(piece.token, row); });
  }
  squares += __shfl_xor_sync(0xFFFFFFFFU, squares, 1);
  squares += __shfl_xor_sync(0xFFFFFFFFU, squares, 2);
  if (piece.exists(0)) {
    finish.store_squares(piece.token, piece.row(0), squares);
  }
}

// A pair becomes one number, so a lane stores 8.
__device__ __forceinline__ void finish_pairs(const GatedSilu<__nv_bfloat16>& finish, const WidePiece& piece,
                                             const float4 (&loaded)[8], const float2 (&sums)[8]) {
  if (!piece.is_whole() || finish.num_rows % 16 != 0) {
    return finish_pairs<GatedSilu<__nv_bfloat16>>(finish, piece, loaded, sums);
  }
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = word_of(make_pair<__nv_bfloat16>(gated_for<__nv_bfloat16>(sums[2 * i].x, sums[2 * i].y),
                                                gated_for<__nv_bfloat16>(sums[2 * i + 1].x, sums[2 * i + 1].y)));
  }
  transpose_four(words);
  if (piece.token_exists) {
    constexpr std::uint32_t kLow = 0x5410;
    constexpr std::uint32_t kHigh = 0x7632;
    *reinterpret_cast<uint4*>(finish.destination(piece.token, piece.begin() + threadIdx.x % 4 * 16)) = {
        __byte_perm(words[0], words[1], kLow), __byte_perm(words[2], words[3], kLow),
        __byte_perm(words[0], words[1], kHigh), __byte_perm(words[2], words[3], kHigh)};
  }
}

// What the finish needs of a piece besides the sums.
template <typename Finish>
__device__ __forceinline__ void load_piece(const Finish& finish, const WidePiece& piece, float4 (&loaded)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    loaded[i] = piece.exists(i) ? finish.load_epilogue(piece.token, piece.row(i)) : float4{};
  }
}

// The threads that multiply: a thread block's tiles, one after the other.
template <typename Shape, typename Finish>
__device__ __forceinline__ void multiply_wide_tiles(const FusedLinear& linear, const Finish& finish,
                                                    const TileWork& work, int num_groups, std::uint32_t ring,
                                                    unsigned char* ring_memory, WideMemory<Shape>& memory) {
  const TilePlan& plan = work.plan;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // A lane's part of a piece of the sums of the warp `of_warp`.
  const auto piece_of = [&](int tile, int of_warp, int number) {
    const int token = of_warp * 16 + number % 2 * 8 + lane / 4;
    const int first_row = tile * plan.rows + number / 2 * 64 + lane % 4 * 2;
    return WidePiece{token, first_row, token < linear.num_tokens && number < Shape::kPieces,
                     min((tile + 1) * plan.rows, linear.num_rows)};
  };
  // This block adds up num_warps warps' sums of a cluster's tile.
  const int num_warps = Shape::kComputeWarps / plan.ranks;
  const auto piece_of_cluster = [&](int number) {
    return piece_of(work.first_tile, work.rank * num_warps + number % num_warps, number / num_warps);
  };

  wait_for_previous_launch();
  RingPosition<Shape::kStages> position;
#pragma unroll 1
  for (int round = 0; round < work.num_rounds; ++round) {
    const int tile = work.tile(round);
    // What the first pieces need is on its way while the products are computed.
    constexpr int kAhead = 2;
    float4 loaded[kAhead][8];
    load_piece(finish, plan.ranks == 1 ? piece_of(tile, warp, 0) : piece_of_cluster(warp), loaded[0]);
    if (plan.ranks == 1) {
      load_piece(finish, piece_of(tile, warp, 1), loaded[1]);
    }
    float sums[Shape::kSums] = {};
    if (warp / 4 < num_groups) {
      multiply_wide_tile<Shape>(work, ring, memory.barriers, position, sums);
    }
    if (linear.squares != nullptr) {
      if (round == 0) {
        wait_named(kScalesBarrier, Shape::kComputeThreads + Shape::kScaleThreads);
      }
      const float* const scale = memory.scales + warp * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) {
        sums[i] *= scale[i / 2 % 2 * 8];
      }
    }
    if (plan.ranks == 1) {
#pragma unroll
      for (int number = 0; number < Shape::kPieces; ++number) {
        float2 pairs[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int first = number / 2 * 32 + 4 * i + number % 2 * 2;
          pairs[i] = {sums[first], sums[first + 1]};
        }
        finish_pairs(finish, piece_of(tile, warp, number), loaded[number % kAhead], pairs);
        if (number + kAhead < Shape::kPieces) {
          load_piece(finish, piece_of(tile, warp, number + kAhead), loaded[number % kAhead]);
        }
      }
      continue;
    }
    // The ring is free: this is the only tile.
    auto* const exchange = reinterpret_cast<float2*>(ring_memory);
    constexpr int kPairs = Shape::kSums / 2;
    wait_named(kComputeBarrier, Shape::kComputeThreads);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      exchange[(warp * kPairs + pair) * 32 + lane] = {sums[2 * pair], sums[2 * pair + 1]};
    }
    wait_for_cluster();
#pragma unroll 1
    for (int number = warp; number < num_warps * Shape::kPieces; number += Shape::kComputeWarps) {
      const WidePiece piece = piece_of_cluster(number);
      if (number != warp) {
        load_piece(finish, piece, loaded[0]);
      }
      const int of_warp = work.rank * num_warps + number % num_warps;
      const int of_piece = number / num_warps;
      const float2* const place = exchange + (of_warp * kPairs + of_piece / 2 * 16 + of_piece % 2) * 32 + lane;
      float2 total[8] = {};
      constexpr int kRanksAtOnce = 2;
      for (int rank = 0; rank < plan.ranks; rank += kRanksAtOnce) {
        float2 part[kRanksAtOnce][8];
#pragma unroll
        for (int r = 0; r < kRanksAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            part[r][i] = load_of_block(place + 2 * i * 32, rank + r);
          }
        }
#pragma unroll
        for (int r = 0; r < kRanksAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            total[i].x += part[r][i].x;
            total[i].y += part[r][i].y;
          }
        }
      }
      finish_pairs(finish, piece, loaded[0], total);
    }
    wait_for_cluster();  // the others have read this block's sums
  }
}

#endif  // COURSE_WGMMA

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    wide_linear(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap x,
                const FusedLinear linear, const TileFinish finish, const TilePlan plan) {
#if COURSE_WGMMA
  extern __shared__ unsigned char shared[];
  const std::uint32_t ring = align_ring(shared_address(shared));
  unsigned char* const ring_memory = shared + (ring - shared_address(shared));
  auto& memory = *reinterpret_cast<WideMemory<Shape>*>(ring_memory + Shape::kRingBytes);
  const TileWork work(linear, plan, Shape::kStageColumns);
  const int num_groups = (linear.num_tokens + 63) / 64;  // warpgroups that have tokens

  allow_next_launch();
  prepare_ring(weights, x, memory.barriers, num_groups);  // a thread of each releases
  if (threadIdx.x < Shape::kComputeThreads) {
    grow_registers<200>();
    finish.visit(
        [&](const auto& one) { multiply_wide_tiles<Shape>(linear, one, work, num_groups, ring, ring_memory, memory); });
    return;
  }
  shrink_registers<104>();
  const int thread = static_cast<int>(threadIdx.x) - Shape::kComputeThreads;
  if (thread == 0) {
    fill_ring<Shape, 1>(
        weights, work, ring, memory.barriers, plan.rows, [&](int round) { return work.tile(round) * plan.rows; },
        streaming_policy());
  } else if (thread == 32) {
    wait_for_previous_launch();
    fill_ring<Shape, 1>(
        x, work, ring + Shape::kWeightBytes, memory.barriers, 64 * num_groups, [](int) { return 0; }, keeping_policy());
  } else if (thread >= 128 - Shape::kScaleThreads && linear.squares != nullptr) {
    find_scales<Shape::kScaleThreads, 8>(linear, 0, 1, linear.num_tokens, thread - (128 - Shape::kScaleThreads),
                                         memory.scales);
    arrive_named(kScalesBarrier, Shape::kComputeThreads + Shape::kScaleThreads);
  }
  __syncwarp();
  if (plan.ranks > 1) {
    wait_for_cluster();
    wait_for_cluster();
  }
#endif
}

}  // namespace common
