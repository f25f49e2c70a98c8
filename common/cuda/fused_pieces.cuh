// How a thread block of a fused product shares its work out: part of fused_kernel.cuh.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/cuda/fused_linear.h"
#include "common/cuda/scalars.cuh"

namespace common {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kTileRows = 8;
inline constexpr int kGroup = kWarps;  // tiles whose sums are finished together, each by one warp
inline constexpr int kTokens = 8;

// How a warp splits a piece of a tile: lane 4 g + t has 16 bytes of row g, columns t * kColumns … (t + 1) * kColumns.
template <typename Scalar>
constexpr int kColumns = 16 / static_cast<int>(sizeof(Scalar));
template <typename Scalar>
constexpr int kPieceColumns = 4 * kColumns<Scalar>;
template <typename Scalar>
constexpr int kColumnsOfSlot = kWarps* kPieceColumns<Scalar>;  // of all warps; a warp's slots are that far apart

// 16 bytes from memory into shared memory; or 16 zero bytes, and memory is not touched.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global, bool exists) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Adds x * w, for 8 columns, to `even` + `odd`: what lane 4 g + t has of token g, times what lane 4 g' + t has of row
// g'. The tensor core takes 16 columns in an order of its own, but any order will do if x and w agree on it. Its sums 0
// and 1 in lane 4 g + t are token g and rows 2 t and 2 t + 1; tokens 8 to 15 of its 16 do not exist. Products that add
// to the same sums wait for each other, so there are two sets of sums.
__device__ __forceinline__ void multiply(float (&even)[2], float (&odd)[2], const uint4& x, const uint4& w,
                                         __nv_bfloat16) {
  const auto step = [](float(&sums)[2], unsigned x0, unsigned x1, unsigned w0, unsigned w1) {
    [[maybe_unused]] float unused[2];
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
        "{%0, %1, %9, %9};"
        : "+f"(sums[0]), "+f"(sums[1]), "=f"(unused[0]), "=f"(unused[1])
        : "r"(x0), "r"(0U), "r"(x1), "r"(w0), "r"(w1), "f"(0.0F));
  };
  step(even, x.x, x.y, w.x, w.y);
  step(odd, x.z, x.w, w.z, w.w);
}

// Float32 has one token, whose columns t all lanes 4 g + t have; all sums are row g's.
__device__ __forceinline__ void multiply(float (&even)[2], float (&odd)[2], const uint4& x, const uint4& w, float) {
  even[0] = fmaf(__uint_as_float(x.x), __uint_as_float(w.x), even[0]);
  even[1] = fmaf(__uint_as_float(x.y), __uint_as_float(w.y), even[1]);
  odd[0] = fmaf(__uint_as_float(x.z), __uint_as_float(w.z), odd[0]);
  odd[1] = fmaf(__uint_as_float(x.w), __uint_as_float(w.w), odd[1]);
}

// Keeps what multiply() gave in `sums`, [token, pair of rows]: each lane adds to what it has stored itself before.
__device__ __forceinline__ void store_partial(float2* sums, int lane, const float (&even)[2], const float (&odd)[2],
                                              bool add, __nv_bfloat16) {
  float2 sum = {even[0] + odd[0], even[1] + odd[1]};
  if (add) {
    sum.x += sums[lane].x;
    sum.y += sums[lane].y;
  }
  sums[lane] = sum;
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

// The order in which a block visits its tiles: tile by tile in a group, columns in batches that the threads hold x for.
struct Visit {
  int group = 0;  // its first tile
  int batch = 0;
  int tile = 0;

  __device__ __forceinline__ void advance(int num_tiles, int num_batches) {
    if (++tile == min(group + kGroup, num_tiles)) {
      if (++batch == num_batches) {
        batch = 0;
        group += kGroup;
      }
      tile = group;
    }
  }
};

}  // namespace common
