// Ragged causal attention on tensor cores: one thread block, some rows of queries (ragged_plan.h), the tokens they see.
//
// flops: 4 * head_dim for each pair of a query head and a token it sees. bytes: a tile of K and V serves 128 rows,
// which is 128 flops a byte from the L2 cache and far more from memory: the kernel is compute-bound. A warp keeps
// 32 rows of output in registers; it multiplies every vector of K and V that it fetches from shared memory with two
// blocks of 16 rows, because with one block the fetches would take as long as the products. The bulk copies of the next
// tile run meanwhile. A multiprocessor has two thread blocks: one computes its softmax while the other multiplies.
#pragma once

#include <cfloat>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/paged/fresh.cuh"
#include "common/paged/online_softmax.cuh"
#include "common/paged/ragged_plan.h"

namespace common {

// One warp's rows: running softmax and output. A thread has rows lane / 4 and lane / 4 + 8 of each block of 16.
template <int kHeadDim, bool kShort>
struct RaggedRows {
  static constexpr RaggedTile kTile = RaggedTileOf<kHeadDim, kShort>::kTile;
  static constexpr int kBlocks = kTile.rows_per_warp / 16;  // blocks of 16 rows
  static constexpr int kSteps = kHeadDim / 16;              // steps of 16 dimensions
  static constexpr int kColumns = kTile.tokens / 8;         // columns of 8 tokens
  using Tile = SharedTile<kHeadDim>;
  static constexpr int kVecs = Tile::kVecs;

  float output[kBlocks][2 * kSteps][4];
  RunningSoftmax softmax[kBlocks][2];  // its sum has only the weights that this thread has computed

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          output[b][n][i] = 0.0F;
        }
      }
      softmax[b][0] = softmax[b][1] = {.largest = -FLT_MAX};  // finite: a row may see nothing of a part's first tile
    }
  }

  // S = Q K^T. queries: this warp's rows; keys: a tile; no row sees more than its first num_seen tokens. kMasked: the
  // tile lies on the diagonal, and tokens that no row sees are skipped; other tiles do without these branches.
  template <bool kMasked>
  __device__ __forceinline__ void score(float (&scores)[kBlocks][kColumns][4], std::uint32_t queries,
                                        std::uint32_t keys, int num_seen) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[b][n][i] = 0.0F;
        }
      }
    }
    const int query_row = lane % 16;
    const std::uint32_t query_begin = queries + Tile::row_begin(query_row);
    const std::uint32_t query_place = fresh(Tile::place(query_row, lane / 16));
    const int key_row = lane / 16 * 8 + lane % 8;
    const std::uint32_t key_begin = keys + Tile::row_begin(key_row);
    const std::uint32_t key_place = fresh(Tile::place(key_row, lane / 8 % 2));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t q[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        common::load_matrices(q[b], query_begin + b * Tile::kBytes + Tile::at_step(query_place, step));
      }
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        if (kMasked && n * 8 >= num_seen) {
          continue;
        }
        std::uint32_t k[4];
        common::load_matrices(k, key_begin + n / 2 * Tile::kBytes + Tile::at_step(key_place, step));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          common::multiply_add(scores[b][n], q[b], k[0], k[1]);
          common::multiply_add(scores[b][n + 1], q[b], k[2], k[3]);
        }
      }
    }
  }

  // Masks the scores of tokens that a row does not see; the tile's first token is first_token. Row r of the sequence
  // sees seen_by_first + r / group tokens, or the last `window` of them if that is not 0.
  template <bool kWindows>
  static __device__ __forceinline__ void mask(float (&scores)[kBlocks][kColumns][4], int first_token, int seen_by_first,
                                              int first_row, int group, int window) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + b * 16 + half * 8 + lane / 4;
        const int visible = seen_by_first + row / group - first_token - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[b][n][half * 2 + i];
            score = n * 8 + i < visible ? score : -INFINITY;
          }
        }
        if (kWindows && window > 0) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& score = scores[b][n][half * 2 + i];
              score = n * 8 + i >= visible - window ? score : -INFINITY;
            }
          }
        }
      }
    }
  }

  // Scores become weights 2^(scale * score - largest); the earlier results are rescaled to the new largest score.
  __device__ __forceinline__ void update_softmax(float (&scores)[kBlocks][kColumns][4], float scale) {
    float rescale[kBlocks][2];
    bool grew = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = scores[b][0][half * 2];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          largest = fmaxf(largest, fmaxf(scores[b][n][half * 2], scores[b][n][half * 2 + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
        RunningSoftmax& own = softmax[b][half];
        const float before = own.largest;
        rescale[b][half] = own.raise_to(fmaxf(before, scale * largest));
        grew |= before != own.largest;
        float added = 0.0F;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[b][n][half * 2 + i];
            score = own.weight_of(score, scale);
            added += score;
          }
        }
        own.sum += added;
      }
    }
    if (__any_sync(~0U, grew)) {  // rare after a few tiles
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            output[b][n][i] *= rescale[b][i / 2];
          }
        }
      }
    }
  }

  // O += P V. The registers of P, a result, become a left operand when they are rounded and packed in pairs.
  template <bool kMasked>
  __device__ __forceinline__ void add_values(const float (&weights)[kBlocks][kColumns][4], std::uint32_t values,
                                             int num_seen) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = lane / 8 % 2 * 8 + lane % 8;
    const std::uint32_t begin = values + Tile::row_begin(row);
    const std::uint32_t place = fresh(Tile::place(row, lane / 16));
#pragma unroll
    for (int t = 0; t < kTile.tokens / 16; ++t) {
      if (kMasked && t * 16 >= num_seen) {
        continue;
      }
      std::uint32_t p[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&w)[4] = weights[b][2 * t + i / 2];
          p[b][i] = common::pack(w[i % 2 * 2], w[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        std::uint32_t v[4];
        common::load_matrices_transposed(v, begin + t * Tile::kBytes + Tile::at_step(place, step));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          common::multiply_add(output[b][2 * step], p[b], v[0], v[1]);
          common::multiply_add(output[b][2 * step + 1], p[b], v[2], v[3]);
        }
      }
    }
  }

  // The sums of both rows of a block of 16, with all threads' weights.
  __device__ __forceinline__ float sum_of(int block, int half) const {
    float total = softmax[block][half].sum;
    total += __shfl_xor_sync(~0U, total, 1);
    return total + __shfl_xor_sync(~0U, total, 2);
  }

  // Stores the finished rows where this warp's queries were: from there they are copied out in 16-byte vectors.
  __device__ __forceinline__ void store(std::uint32_t rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float inverse = 1.0F / sum_of(b, half);
        const int row = b * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
          const std::uint32_t address = rows + vec_place(kVecs, kTileRows, row, n) * kVecBytes + lane % 4 * 4;
          const std::uint32_t pair =
              common::pack(output[b][n][half * 2] * inverse, output[b][n][half * 2 + 1] * inverse);
          common::store_word(address, pair);
        }
      }
    }
  }

  // Stores the first num_rows rows of a part of the context. kLowered: the stored maximum is that much lower than the
  // rows' own, and sum and output are 2^kLowered times as large.
  template <int kLowered>
  __device__ __forceinline__ void store_part(float* outputs, float2* max_and_sum, int num_rows) const {
    constexpr auto kFactor = static_cast<float>(std::uint64_t{1} << kLowered);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = sum_of(b, half);
        const int row = b * 16 + half * 8 + lane / 4;
        if (row < num_rows) {
          if (lane % 4 == 0) {
            max_and_sum[row] = make_float2(softmax[b][half].largest - kLowered, total * kFactor);
          }
#pragma unroll
          for (int n = 0; n < 2 * kSteps; ++n) {
            *reinterpret_cast<float2*>(outputs + row * kHeadDim + n * 8 + lane % 4 * 2) =
                make_float2(output[b][n][half * 2] * kFactor, output[b][n][half * 2 + 1] * kFactor);
          }
        }
      }
    }
  }
};

}  // namespace common
