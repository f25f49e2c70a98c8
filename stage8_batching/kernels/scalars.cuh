// The three element types, for kernels: conversions to and from float, and two 16-bit numbers in a 32-bit register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace stage8 {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename Scalar>
__device__ __forceinline__ Scalar from_float(float x) {
  if constexpr (sizeof(Scalar) == 4) {
    return x;
  } else if constexpr (std::is_same_v<Scalar, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// `low` in the lower half: the element with the smaller index.
template <typename Scalar>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Scalar, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

// The elements of one 16-byte piece.
template <typename Scalar>
struct Piece {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(Scalar));
  uint4 bits;

  __device__ __forceinline__ float operator[](int i) const {
    return to_float(reinterpret_cast<const Scalar*>(&bits)[i]);
  }
};

// 2^x, to about 2 units in the last place: one instruction, where expf takes about ten. 2^-infinity is 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace
