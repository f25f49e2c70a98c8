// A product for some dozens of tokens. It is still bound by reading the weights, but in a kernel by rows
// (fused_kernel.cuh) every thread block reads all of x for a few rows of weights, and an instruction multiplies only 16
// columns of 8 rows and 16 tokens. So here weights come in tiles of up to 256 rows, and wgmma multiplies them where
// they lie in shared memory: its fixed side of 64 takes rows of weights, and its variable side, 16 to 64, or 128 with
// float8 weights, takes tokens.
//
// - Two threads have the copy engine fill a ring: a stage is 64 columns of a tile's rows, or 128 of float8 weights, and
//   of all tokens' x. Copies of weights start before the previous launch has finished, copies of x after it has.
// - One or two warpgroups multiply what has arrived.
// - A thread block has some tiles of the weights, one after the other; the ring goes on filling while a tile is
//   finished. Where there are fewer tiles than multiprocessors, a cluster of blocks shares a tile: each multiplies some
//   of the columns, and the sums are added up through the cluster's shared memory, always in the same order.
// - Sums go to shared memory and back before they are finished, because a thread's sums belong to two tokens and one
//   row, and what is written needs neighbouring rows of one token.
// - The norm's scale of a token, as always here, is applied to the finished sums; so is float8's scale of a row.
// - wgmma does not multiply float8 by bfloat16, but it also takes weights from registers. A thread loads its own part
//   of 16 columns and unpacks it there, while the products of the previous columns are in flight.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "common/cuda/model/tile_pieces.cuh"

namespace common {

// kTokens: the largest number of tokens. A tile is kRowGroups * kBlocks * 64 rows, or less, as the plan says, and
// kColumnGroups warpgroups share a row group's stages: a single one multiplies too slowly what the ring has collected
// while it waited for x.
template <int kTileTokens, int kTileRowGroups, int kTileBlocks, int kTileColumnGroups, bool kFloat8Weights>
struct TileShape {
  static constexpr bool kFloat8 = kFloat8Weights;
  static constexpr int kTokens = kTileTokens;
  static constexpr int kRowGroups = kTileRowGroups;
  static constexpr int kColumnGroups = kTileColumnGroups;
  static constexpr int kWarpgroups = kRowGroups * kColumnGroups;
  static constexpr int kBlocks = kTileBlocks;
  static constexpr int kRows = 64 * kRowGroups * kBlocks;
  static constexpr int kComputeWarps = 4 * kWarpgroups;
  static constexpr int kComputeThreads = 32 * kComputeWarps;
  static constexpr int kThreads = kComputeThreads + 128;  // a warpgroup more, which copies and finds scales
  // One thread of this many says that all of them have read a stage. Each warp loads its own float8 weights.
  static constexpr int kReleasingThreads = kFloat8 ? 32 : 128;
  // A stage has one panel of weights, and the panels of x that have the same columns.
  static constexpr int kXPanels = kFloat8 ? 2 : 1;
  static constexpr int kStageColumns = kXPanels * kPanelColumns;
  static constexpr int kWeightBytes = kRows * kPanelRowBytes;
  static constexpr int kXPanelBytes = kTokens * kPanelRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kXPanels * kXPanelBytes;
  // How many pieces of 64 rows of a token a warp finishes at once: as many as fit into registers beside the sums.
  static constexpr int kPiecesAtOnce = kBlocks * kTokens >= 128 ? 4 : 8;
  // The sums go through shared memory: some tokens at a time, or all when the ring's memory is free. The pitch spreads
  // a warp's writes over different banks.
  static constexpr int kTokensAtOnce = kTokens < 32 ? kTokens : 32;
  static constexpr int kSumPitch = kRows + 4;
  // Half of the column groups' sums at a time are added to the other half's.
  static constexpr int kExchangedFloats = kTokensAtOnce * (kColumnGroups > 1 ? kColumnGroups / 2 * kRows : 0);
  static constexpr int kSumFloats = std::max(kTokensAtOnce * kSumPitch, kExchangedFloats);
  static constexpr int kSumBytes = kSumFloats * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = 227 * 1024;
  // A column group always has the same stages: it has to see each barrier's every phase.
  static constexpr int kStages = (kSharedBytes - 1024 - 1024 - kSumBytes) / kStageBytes / kColumnGroups * kColumnGroups;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static_assert(kTokens / kTokensAtOnce * kSumBytes <= kRingBytes);
};

// The contents of shared memory behind the ring.
template <typename Shape>
struct TileMemory {
  float sums[Shape::kSumFloats];
  float scales[Shape::kTokens];
  RingBarriers<Shape::kStages> ring;
};

#if COURSE_WGMMA

// How many of the first num_tokens tokens this block finishes: tokens rank, rank + ranks, …
__device__ __forceinline__ int tokens_of_rank(const TileWork& work, int num_tokens) {
  return (num_tokens + work.plan.ranks - 1 - work.rank) / work.plan.ranks;
}

// A warpgroup's rows of a stage, times x: enqueues the products, in one group.
template <typename Shape>
__device__ __forceinline__ void multiply_stage(std::uint32_t weights, std::uint32_t x, bool adds,
                                               float (&sums)[Shape::kBlocks][Shape::kTokens / 2]) {
  const std::uint64_t weights_at = panel_descriptor(weights);
  const std::uint64_t x_at = panel_descriptor(x);
  fence_products();
#pragma unroll
  for (int step = 0; step < kPanelColumns / 16; ++step) {
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      multiply_rows<Shape::kTokens>(sums[block], weights_at + block * kDescriptorBlock + step * kDescriptorStep,
                                    x_at + step * kDescriptorStep, adds || step > 0);
    }
  }
  commit_products();
}

// The same for float8, in groups of products, two in flight at a time: while the tensor cores multiply, the weights of
// the next group are unpacked. begun() is called when the previous products have finished. Returns when the weights
// have been read; the caller waits for the last group later.
template <typename Shape, typename Begun>
__device__ __forceinline__ void multiply_float8_stage(std::uint32_t weights, std::uint32_t x, bool adds,
                                                      float (&sums)[Shape::kBlocks][Shape::kTokens / 2],
                                                      const Begun& begun) {
  constexpr int kSteps = Shape::kStageColumns / 16;
  constexpr int kStepsOfPanel = kPanelColumns / 16;
  constexpr int kStepsOfGroup = 4 / Shape::kBlocks;
  // The words of a warp's 16 rows, two steps at a time: a piece of 16 bytes is a row's 16 columns.
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  const std::uint32_t piece = lane / 16 ^ row % 8;
  std::uint32_t words[kSteps / 2][Shape::kBlocks][4];
#pragma unroll
  for (int pair = 0; pair < kSteps / 2; ++pair) {
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      load_matrices(words[pair][block], weights + (block * 64 + row) * kPanelRowBytes + (piece ^ 2 * pair) * 16);
    }
  }
#pragma unroll
  for (int first = 0; first < kSteps; first += kStepsOfGroup) {
    std::uint32_t unpacked[kStepsOfGroup][Shape::kBlocks][4];
#pragma unroll
    for (int i = 0; i < kStepsOfGroup; ++i) {
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block) {
        const std::uint32_t* of_step = words[(first + i) / 2][block] + (first + i) % 2 * 2;
        unpack_four(of_step[0], unpacked[i][block][0], unpacked[i][block][2]);
        unpack_four(of_step[1], unpacked[i][block][1], unpacked[i][block][3]);
      }
    }
    const std::uint64_t x_at = panel_descriptor(x + first / kStepsOfPanel * Shape::kXPanelBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < kStepsOfGroup; ++i) {
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block) {
        multiply_registers_by_rows<Shape::kTokens>(sums[block], unpacked[i][block],
                                                   x_at + (first + i) % kStepsOfPanel * kDescriptorStep,
                                                   adds || first + i > 0);
      }
    }
    commit_products();
    wait_products<1>();
    if (first == 0) {
      begun();
    }
  }
}

// A warpgroup's part of a tile, times x: its rows, and every kColumnGroups-th stage of the ring.
template <typename Shape>
__device__ __forceinline__ void multiply_tile(const TileWork& work, std::uint32_t ring, TileMemory<Shape>& memory,
                                              RingPosition<Shape::kStages>& position,
                                              float (&sums)[Shape::kBlocks][Shape::kTokens / 2]) {
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int row_group = warpgroup % Shape::kRowGroups;
  const int column_group = warpgroup / Shape::kRowGroups;
  const std::uint32_t own_rows = static_cast<std::uint32_t>(row_group * Shape::kBlocks * 64 * kPanelRowBytes);
  int multiplied = -1;  // the stage whose products are in flight
  // For float8, no fence_copy_engine() comes between the weights' ordinary loads and the copy that follows them, though
  // the manual asks for one between the two proxies (tile_ring.cuh in the stages has it). The loads have ended, because
  // their products have, and the barrier orders the copy after this arrival, as in CUTLASS's pipelines. With a fence
  // in each thread a product takes up to 2 % longer (H200, gate and up of 1B, 32 tokens: 12.8 us for 12.6).
  const auto release = [&] {
    if (multiplied >= 0 && threadIdx.x % Shape::kReleasingThreads == 0) {
      arrive(shared_address(&memory.ring.empty[multiplied]));
    }
  };
#pragma unroll 1
  for (int stage = work.first_stage; stage < work.last_stage; ++stage) {
    if (Shape::kColumnGroups == 1 || position.place % Shape::kColumnGroups == column_group) {
      wait_barrier(shared_address(&memory.ring.full[position.place]), position.parity);
      const std::uint32_t weights = ring + static_cast<std::uint32_t>(position.place * Shape::kStageBytes);
      const std::uint32_t x = weights + Shape::kWeightBytes;
      const bool adds = multiplied >= 0;
      if constexpr (Shape::kFloat8) {
        multiply_float8_stage<Shape>(weights + own_rows, x, adds, sums, release);
      } else {
        multiply_stage<Shape>(weights + own_rows, x, adds, sums);
        wait_products<1>();
        release();
      }
      multiplied = position.place;
    }
    position.advance();
  }
  wait_products<0>();
  release();
#pragma unroll
  for (int block = 0; block < Shape::kBlocks; ++block) {
    fence_registers(sums[block]);
    if (Shape::kColumnGroups > 1 && multiplied < 0) {
#pragma unroll
      for (float& sum : sums[block]) {
        sum = 0.0F;
      }
    }
  }
}

// Adds up the column groups' sums of tokens first_token to last_token - 1, in the first group's registers. All warps
// that compute call this. `exchange` has room for tokens_at_once, and for nothing else meanwhile.
template <typename Shape>
__device__ __forceinline__ void add_column_groups(float (&sums)[Shape::kBlocks][Shape::kTokens / 2], int first_token,
                                                  int last_token, int tokens_at_once, float* exchange) {
  constexpr int kGroupThreads = 128 * Shape::kRowGroups;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const auto for_each_sum = [&](int place, const auto& run) {
    float* const own = exchange + place * Shape::kRows * tokens_at_once + threadIdx.x % kGroupThreads;
#pragma unroll
    for (int i = 0; i < Shape::kTokens / 8; ++i) {
      if (8 * i < first_token || 8 * i >= last_token) {
        continue;
      }
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block) {
        float* const of_tokens = own + (block * tokens_at_once + 8 * i - first_token) / 2 * kGroupThreads;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          run(of_tokens[j * kGroupThreads], sums[block][4 * i + j]);
        }
      }
    }
  };
#pragma unroll
  for (int half = Shape::kColumnGroups / 2; half > 0; half /= 2) {
    if (group >= half && group < 2 * half) {
      for_each_sum(group - half, [](float& place, float sum) { place = sum; });
    }
    wait_named(kComputeBarrier, Shape::kComputeThreads);
    if (group < half) {
      for_each_sum(group, [](float place, float& sum) { sum += place; });
    }
    wait_named(kComputeBarrier, Shape::kComputeThreads);
  }
}

// A thread's sums of tokens first_token to last_token - 1 to [token - first_token][row of the tile].
template <typename Shape>
__device__ __forceinline__ void store_sums(const float (&sums)[Shape::kBlocks][Shape::kTokens / 2], int first_token,
                                           int last_token, float* destination) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int row = warpgroup * Shape::kBlocks * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < Shape::kTokens / 8; ++i) {
    if (8 * i < first_token || 8 * i >= last_token) {
      continue;
    }
    float* of_token = destination + (8 * i - first_token + thread % 4 * 2) * Shape::kSumPitch + row;
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of_token[j % 2 * Shape::kSumPitch + block * 64 + j / 2 * 8] = sums[block][4 * i + j];
      }
    }
  }
}

// Finishes a tile's sums: a warp finishes 64 rows of a token at a time, two for each lane, with several such pieces in
// flight. begin() is called when the first loads are in flight: it waits for the sums.
template <typename Shape, typename Finish, typename Begin>
__device__ __forceinline__ void finish_tokens(const FusedLinear& linear, const Finish& finish, const TileWork& work,
                                              int tile, int first_token, int last_token, const float* sums,
                                              const float (&scales)[Shape::kTokens], const Begin& begin) {
  constexpr int kGroups = Shape::kRows / 64;
  constexpr int kTokensOfWarp = Shape::kPiecesAtOnce / kGroups;
  constexpr int kStep = kTokensOfWarp * Shape::kComputeWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_row = tile * work.plan.rows;
  const int num_rows = min(work.plan.rows, linear.num_rows - first_row);  // of the tile
  // The tokens that this block finishes, by number.
  const int first = tokens_of_rank(work, first_token);
  const int last = tokens_of_rank(work, last_token);
  const auto token_of = [&](int number) { return work.rank + number * work.plan.ranks; };
  bool begun = false;
#pragma unroll 1
  for (int at = first + warp; at < last || !begun; at += kStep) {
    float4 loaded[kTokensOfWarp][kGroups];
    [[maybe_unused]] float2 row_scales[kGroups];
    if constexpr (Shape::kFloat8) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int row = group * 64 + 2 * lane;
        row_scales[group] =
            row < num_rows ? *reinterpret_cast<const float2*>(linear.row_scales + first_row + row) : float2{};
      }
    }
    float2 total[kTokensOfWarp][kGroups] = {};
    const auto exists = [&](int i, int group) {
      return at + i * Shape::kComputeWarps < last && group * 64 + 2 * lane < num_rows;
    };
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        loaded[i][group] = exists(i, group) ? finish.load_epilogue(token_of(at + i * Shape::kComputeWarps),
                                                                   first_row + group * 64 + 2 * lane)
                                            : float4{};
      }
    }
    if (!begun) {
      begin();
      begun = true;
    }
    const auto place = [&](int i, int group) {
      return reinterpret_cast<const float2*>(
          sums + (token_of(at + i * Shape::kComputeWarps) - first_token) * Shape::kSumPitch + group * 64 + 2 * lane);
    };
    if (work.plan.ranks == 1) {
#pragma unroll
      for (int i = 0; i < kTokensOfWarp; ++i) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          total[i][group] = exists(i, group) ? *place(i, group) : float2{};
        }
      }
    } else {
      constexpr int kRanksAtOnce = 4;
      for (int rank = 0; rank < work.plan.ranks; rank += kRanksAtOnce) {
        float2 part[kRanksAtOnce][kTokensOfWarp][kGroups] = {};
#pragma unroll
        for (int r = 0; r < kRanksAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < kTokensOfWarp; ++i) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
              if (rank + r < work.plan.ranks && exists(i, group)) {
                part[r][i][group] = load_of_block(place(i, group), rank + r);
              }
            }
          }
        }
#pragma unroll
        for (int r = 0; r < kRanksAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < kTokensOfWarp; ++i) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
              total[i][group].x += part[r][i][group].x;
              total[i][group].y += part[r][i][group].y;
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      const int number = at + i * Shape::kComputeWarps;
      const float scale = number < last ? scales[number] : 0.0F;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if constexpr (Shape::kFloat8) {
          total[i][group] = {total[i][group].x * row_scales[group].x, total[i][group].y * row_scales[group].y};
        }
        finish(exists(i, group), token_of(number), first_row + group * 64 + 2 * lane, loaded[i][group],
               {total[i][group].x * scale, total[i][group].y * scale});
      }
    }
  }
}

#endif  // COURSE_WGMMA

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    tiled_linear(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap x,
                 const FusedLinear linear, const TileFinish finish, const TilePlan plan) {
#if COURSE_WGMMA
  extern __shared__ unsigned char shared[];
  const std::uint32_t ring = align_ring(shared_address(shared));
  unsigned char* const ring_memory = shared + (ring - shared_address(shared));
  auto& memory = *reinterpret_cast<TileMemory<Shape>*>(ring_memory + Shape::kRingBytes);
  const TileWork work(linear, plan, Shape::kStageColumns);
  constexpr int kScaleThreads = 64;

  allow_next_launch();
  prepare_ring(weights, x, memory.ring, 128 * Shape::kRowGroups / Shape::kReleasingThreads);
  if (threadIdx.x >= Shape::kComputeThreads) {
    if constexpr (Shape::kWarpgroups == 2) {
      shrink_registers<56>();
    }
    const int thread = static_cast<int>(threadIdx.x) - Shape::kComputeThreads;
    if (thread == 0) {
      fill_ring<Shape, 1>(
          weights, work, ring, memory.ring, plan.rows, [&](int round) { return work.tile(round) * plan.rows; },
          streaming_policy());
    } else if (thread == 32) {
      wait_for_previous_launch();
      fill_ring<Shape, Shape::kXPanels>(
          x, work, ring + Shape::kWeightBytes, memory.ring, Shape::kTokens, [](int) { return 0; }, keeping_policy());
    } else if (thread >= 128 - kScaleThreads) {
      find_scales<kScaleThreads, 4>(linear, work.rank, plan.ranks, tokens_of_rank(work, linear.num_tokens),
                                    thread - (128 - kScaleThreads), memory.scales);
      arrive_named(kScalesBarrier, Shape::kComputeThreads + kScaleThreads);
    }
    __syncwarp();
    if (plan.ranks > 1) {
      wait_for_cluster();
      wait_for_cluster();
    }
  } else {
    if constexpr (Shape::kWarpgroups == 2) {
      grow_registers<224>();
    }
    wait_for_previous_launch();
    RingPosition<Shape::kStages> position;
#pragma unroll 1
    for (int round = 0; round < work.num_rounds; ++round) {
      float sums[Shape::kBlocks][Shape::kTokens / 2];
      multiply_tile<Shape>(work, ring, memory, position, sums);
      if (round == 0) {
        wait_named(kScalesBarrier, Shape::kComputeThreads + kScaleThreads);
      }
      // After the last tile, the ring has room for all sums.
      const bool is_last = round + 1 == work.num_rounds;
      float* const exchange = is_last ? reinterpret_cast<float*>(ring_memory) : memory.sums;
      const int tokens_at_once = is_last ? Shape::kTokens : Shape::kTokensAtOnce;
#pragma unroll 1
      for (int first_token = 0; first_token < linear.num_tokens; first_token += tokens_at_once) {
        const int last_token = min(first_token + tokens_at_once, linear.num_tokens);
        wait_named(kComputeBarrier, Shape::kComputeThreads);  // nothing else is read from there any more
        add_column_groups<Shape>(sums, first_token, last_token, tokens_at_once, exchange);
        if (threadIdx.x < 128 * Shape::kRowGroups) {
          store_sums<Shape>(sums, first_token, last_token, exchange);
        }
        finish.visit([&](const auto& one) {
          finish_tokens<Shape>(linear, one, work, work.tile(round), first_token, last_token, exchange, memory.scales,
                               [&] {
                                 if (plan.ranks > 1) {
                                   wait_for_cluster();
                                 } else {
                                   wait_named(kComputeBarrier, Shape::kComputeThreads);
                                 }
                               });
        });
      }
    }
    if (plan.ranks > 1) {
      wait_for_cluster();  // the others have read this block's sums
    }
  }
#endif
}

}  // namespace common
