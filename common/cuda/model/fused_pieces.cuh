// How a thread block of a fused product shares out its work: part of fused_kernel.cuh.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/cuda/model/linear_arguments.h"
#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"

namespace common {

inline constexpr int kTileRows = 8;

// kTokens: the largest number of tokens, 8, 16 or 32.
template <typename ScalarType, typename WeightType, int kMaxTokens, int kBlockWarps>
struct RowShape {
  using Scalar = ScalarType;
  using Weight = WeightType;
  static constexpr bool kFloat8 = sizeof(Weight) == 1;
  static constexpr int kTokens = kMaxTokens;
  static constexpr int kEights = kTokens / 8;
  static constexpr int kWarps = kBlockWarps;
  static constexpr int kThreads = 32 * kWarps;
  // How a warp splits a piece of a tile: lane 4 g + t has 16 bytes of row g, columns t * kColumns … (t + 1) * kColumns.
  static constexpr int kColumns = 16 / static_cast<int>(sizeof(Weight));
  static constexpr int kPieceColumns = 4 * kColumns;
  static constexpr int kColumnsOfSlot = kWarps * kPieceColumns;  // of all warps; a warp's slots are that far apart
  static constexpr int kVisitTiles = kFloat8 ? 2 : 1;            // which a block visits at a time
  static constexpr int kGroup = kTokens <= 16 ? 8 : 4;           // tiles whose sums are finished together
  static constexpr int kPairs = 4 * kTokens;                     // of a tile's sums, each of two rows and a token
  static constexpr int kPasses = (kGroup * kPairs + kThreads - 1) / kThreads;  // in each, a thread finishes a pair
};

// A token's row of x; -1 if the token or the row does not exist.
__device__ __forceinline__ int row_of_x(const FusedLinear& linear, int token) {
  if (token >= linear.num_tokens) {
    return -1;
  }
  const int row = linear.rows == nullptr ? token : linear.rows[token];
  return row >= 0 && row < linear.num_x_rows ? row : -1;
}

// One over the root of the mean square of a token's row of x, from the sums of its squares. kLanes neighbouring lanes
// of a warp, `lane` 0 to kLanes - 1, call it together, and each gets the result. NaN for a row that does not exist.
template <int kLanes>
__device__ __forceinline__ float norm_scale(const FusedLinear& linear, int token, int lane) {
  const int row = row_of_x(linear, token);
  if (linear.squares == nullptr) {
    return row >= 0 ? 1.0F : __int_as_float(0x7FFFFFFF);
  }
  const int count = linear.num_cols / kSquaresColumns;
  const float* squares = linear.squares + std::int64_t{max(row, 0)} * count;
  float sum = 0.0F;
#pragma unroll 1
  for (int first = lane; first < count; first += 8 * kLanes) {
    float values[8];  // all loads are in flight before the first value is added
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = first + kLanes * i < count ? __ldcg(squares + first + kLanes * i) : 0.0F;
    }
#pragma unroll
    for (const float value : values) {
      sum += value;
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFU, sum, distance);
  }
  return row >= 0 ? rsqrtf(sum / static_cast<float>(linear.num_cols) + linear.epsilon) : __int_as_float(0x7FFFFFFF);
}

// 16 bytes of x, which every block reads. Not by __ldcg: that load allows for concurrent changes, and has to go to the
// half of L2 that owns the line. The data here was written by launches that have finished.
__device__ __forceinline__ uint4 load_x_piece(const void* source) { return load_past_l1(source); }

// Copies 16 bytes from memory into shared memory; if they do not exist, stores 16 zero bytes instead.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global, bool exists) {
  copy_vec_async(shared_address(shared), global, exists);
}

// Adds x * w, for 8 columns, to `even` + `odd`: what lane 4 g + t has of token g, times what lane 4 g' + t has of row
// g'. The tensor core takes 16 columns in an order of its own, but any order will do if x and w agree on it. Its sums 0
// and 1 in lane 4 g + t are token g and rows 2 t and 2 t + 1; tokens 8 to 15 of its 16 do not exist. Products that add
// to the same sums wait for each other, so there are two sets of sums.
__device__ __forceinline__ void multiply(float (&even)[2], float (&odd)[2], const uint4& x, const uint4& w,
                                         __nv_bfloat16) {
  multiply_add_upper(even, x.x, x.y, w.x, w.y);
  multiply_add_upper(odd, x.z, x.w, w.z, w.w);
}

// Float32 has one token, whose columns t all lanes 4 g + t have; all sums are row g's.
__device__ __forceinline__ void multiply(float (&even)[2], float (&odd)[2], const uint4& x, const uint4& w, float) {
  even[0] = fmaf(__uint_as_float(x.x), __uint_as_float(w.x), even[0]);
  even[1] = fmaf(__uint_as_float(x.y), __uint_as_float(w.y), even[1]);
  odd[0] = fmaf(__uint_as_float(x.z), __uint_as_float(w.z), odd[0]);
  odd[1] = fmaf(__uint_as_float(x.w), __uint_as_float(w.w), odd[1]);
}

// For 9 tokens or more, which need all 16 rows of a product. low and high are 16 bytes of token g and of token g + 8;
// afterwards they are the operands of two products, 4 neighbouring registers each. The compiler would otherwise repeat
// the copies before every product, so `zero`, which it does not know, makes them look like arithmetic.
__device__ __forceinline__ void interleave(uint4& low, uint4& high, unsigned zero) {
  const uint4 first = {low.x | zero, high.x | zero, low.y | zero, high.y | zero};
  const uint4 second = {low.z | zero, high.z | zero, low.w | zero, high.w | zero};
  low = first;
  high = second;
}

// Sums 0 and 1 in lane 4 g + t are token g and rows 2 t and 2 t + 1, sums 2 and 3 the same rows of token g + 8.
__device__ __forceinline__ void multiply_full(float (&sums)[4], const uint4& x, unsigned w0, unsigned w1) {
  multiply_add(sums, {x.x, x.y, x.z, x.w}, w0, w1);
}

__device__ __forceinline__ void store_sums(float2* place, float x, float y, bool add) {
  *place = add ? float2{place->x + x, place->y + y} : float2{x, y};
}

// Stores multiply()'s results in `sums`, [token, pair of rows], or adds them to the sums that the lane itself has
// stored there.
__device__ __forceinline__ void store_partial(float2* sums, int lane, const float (&even)[2], const float (&odd)[2],
                                              bool add, __nv_bfloat16) {
  store_sums(sums + lane, even[0] + odd[0], even[1] + odd[1], add);
}

__device__ __forceinline__ void store_partial(float2* sums, int lane, const float (&even)[2], const float (&odd)[2],
                                              bool add, float) {
  float sum = (even[0] + even[1]) + (odd[0] + odd[1]);
  sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
  if (lane % 4 == 0) {
    float* of_row = reinterpret_cast<float*>(sums) + lane / 4;
    *of_row = add ? *of_row + sum : sum;
  }
}

// Float8: a thread's 16 columns of row g in each of two tiles, times x of these columns, for token g in each eight.
// Here the tensor core's 16 rows are rows of weights, so that each weight is unpacked once for all tokens, and
// multiplied by 8 tokens at a time. Sums 0 and 1 in lane 4 g + t are row g of the first tile and tokens 2 t and 2 t +
// 1, sums 2 and 3 the same for the second tile. Neighbouring words add to different sets of sums.
template <int kEights>
__device__ __forceinline__ void multiply_float8(float (&sums)[2][kEights][4], const uint4& first, const uint4& second,
                                                const uint4 (&x)[2][kEights]) {
  const auto multiply_word = [&](int set, std::uint32_t of_first, std::uint32_t of_second, unsigned uint4::*word) {
    std::uint32_t w[4];
    unpack_four(of_first, w[0], w[2]);
    unpack_four(of_second, w[1], w[3]);
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      multiply_full(sums[set][i], {w[0], w[1], w[2], w[3]}, x[0][i].*word, x[1][i].*word);
    }
  };
  multiply_word(0, first.x, second.x, &uint4::x);
  multiply_word(1, first.y, second.y, &uint4::y);
  multiply_word(0, first.z, second.z, &uint4::z);
  multiply_word(1, first.w, second.w, &uint4::w);
}

// Stores that result for one of the tiles: `tile` points to its sums 0, or 2, in [token, row].
template <int kEights>
__device__ __forceinline__ void store_float8(float* sums, int lane, const float (&even)[kEights][4],
                                             const float (&odd)[kEights][4], int tile, bool add) {
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
#pragma unroll
    for (int token = 0; token < 2; ++token) {
      float* const place = sums + (8 * i + lane % 4 * 2 + token) * kTileRows + lane / 4;
      const float sum = even[i][2 * tile + token] + odd[i][2 * tile + token];
      *place = add ? *place + sum : sum;
    }
  }
}

// The order in which a block visits its tiles: one after the other within a group, in batches of columns for which the
// threads hold x.
template <typename Shape>
struct Visit {
  int group = 0;  // its first tile
  int batch = 0;
  int tile = 0;

  __device__ __forceinline__ void advance(int num_tiles, int num_batches) {
    tile += Shape::kVisitTiles;
    if (tile >= min(group + Shape::kGroup, num_tiles)) {
      if (++batch == num_batches) {
        batch = 0;
        group += Shape::kGroup;
      }
      tile = group;
    }
  }
};

}  // namespace common
