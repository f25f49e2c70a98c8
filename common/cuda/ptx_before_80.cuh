// What ptx.cuh has for compute capability 8.0 and newer, made of what older chips have: a T4 (7.5). Included by it
// alone.
//
// Right and slow. There are no tensor cores for bfloat16 and no asynchronous copies: matrices are multiplied by
// ordinary arithmetic, and a copy has ended when it has been started.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace common {

struct BFloat16Pair {
  static __device__ __forceinline__ float2 floats(std::uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U)};
  }
};
struct HalfPair {
  static __device__ __forceinline__ float2 floats(std::uint32_t pair) {
    __half2 halves;
    memcpy(&halves, &pair, sizeof(halves));
    return __half22float2(halves);
  }
};

__device__ __forceinline__ std::uint32_t multiply_add_pairs(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const float2 x = BFloat16Pair::floats(a);
  const float2 y = BFloat16Pair::floats(b);
  const float2 z = BFloat16Pair::floats(c);
  const __nv_bfloat162 sum = __floats2bfloat162_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
  std::uint32_t result;
  memcpy(&result, &sum, sizeof(result));
  return result;
}

// c + a b. In each of four rounds, a thread gets two columns of its two rows of a, eight columns apart twice, and the
// same rows of its two columns of b, from the threads that have them. A function by itself: kernels multiply in many
// places, and would be compiled for half an hour.
template <typename Pair>
__device__ __noinline__ float4 multiply_by_lanes(float4 c, uint4 a, std::uint32_t b0, std::uint32_t b1) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int round = 0; round < 4; ++round) {
    const int of_rows = lane / 4 * 4 + round;
    const float2 upper_left = Pair::floats(__shfl_sync(~0U, a.x, of_rows));
    const float2 lower_left = Pair::floats(__shfl_sync(~0U, a.y, of_rows));
    const float2 upper_right = Pair::floats(__shfl_sync(~0U, a.z, of_rows));
    const float2 lower_right = Pair::floats(__shfl_sync(~0U, a.w, of_rows));
    const auto add = [&](float& upper, float& lower, int column) {
      const int of_columns = (lane % 4 * 2 + column) * 4 + round;
      const float2 first = Pair::floats(__shfl_sync(~0U, b0, of_columns));
      const float2 second = Pair::floats(__shfl_sync(~0U, b1, of_columns));
      upper = fmaf(upper_left.x, first.x, fmaf(upper_left.y, first.y, upper));
      upper = fmaf(upper_right.x, second.x, fmaf(upper_right.y, second.y, upper));
      lower = fmaf(lower_left.x, first.x, fmaf(lower_left.y, first.y, lower));
      lower = fmaf(lower_right.x, second.x, fmaf(lower_right.y, second.y, lower));
    };
    add(c.x, c.z, 0);
    add(c.y, c.w, 1);
  }
  return c;
}

template <typename Pair>
__device__ __forceinline__ void multiply_add_of(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                std::uint32_t b1) {
  const float4 sums =
      multiply_by_lanes<Pair>(make_float4(c[0], c[1], c[2], c[3]), make_uint4(a[0], a[1], a[2], a[3]), b0, b1);
  c[0] = sums.x;
  c[1] = sums.y;
  c[2] = sums.z;
  c[3] = sums.w;
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  multiply_add_of<BFloat16Pair>(c, a, b0, b1);
}
__device__ __forceinline__ void multiply_add_halves(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
  multiply_add_of<HalfPair>(c, a, b0, b1);
}
__device__ __forceinline__ void multiply_add_upper(float (&c)[2], std::uint32_t a0, std::uint32_t a1, std::uint32_t b0,
                                                   std::uint32_t b1) {
  float all[4] = {c[0], c[1], 0.0F, 0.0F};
  multiply_add_of<BFloat16Pair>(all, {a0, 0U, a1, 0U}, b0, b1);
  c[0] = all[0];
  c[1] = all[1];
}

using CachePolicy = std::uint64_t;
__device__ __forceinline__ CachePolicy streaming_policy() { return 0; }
__device__ __forceinline__ CachePolicy keeping_policy() { return 0; }
__device__ __forceinline__ uint4 load_once(const uint4* from, CachePolicy /*policy*/) { return __ldcs(from); }
__device__ __forceinline__ void store_once(uint4* to, uint4 x, CachePolicy /*policy*/) { __stcs(to, x); }

__device__ __forceinline__ void copy_vec_async(std::uint32_t shared, const void* global, bool exists = true) {
  uint4 x = {0, 0, 0, 0};
  if (exists) {
    x = *static_cast<const uint4*>(global);
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {}
template <int pending>
__device__ __forceinline__ void wait_copies() {}

}  // namespace common
