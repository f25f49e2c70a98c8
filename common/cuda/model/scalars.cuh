// The two element types of the model, for kernels: conversions, and the small functions that several kernels need.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/cuda/precision.h"
#include "common/cuda/ptx.cuh"

namespace common {

// Calls run(Scalar{}) with the type of the precision.
template <typename Run>
void with_scalar(Precision precision, const Run& run) {
  precision == Precision::kFloat32 ? run(float{}) : run(__nv_bfloat16{});
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename Scalar>
__device__ __forceinline__ Scalar from_float(float x) {
  if constexpr (sizeof(Scalar) == 4) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two adjacent elements, 8 or 4 bytes: the numbers that are rotated together, or a gate and its up.
template <typename Scalar>
struct alignas(2 * sizeof(Scalar)) Pair {
  Scalar first;
  Scalar second;
};

template <typename Scalar>
__device__ __forceinline__ Pair<Scalar> make_pair(float first, float second) {
  return {from_float<Scalar>(first), from_float<Scalar>(second)};
}

// A weight in e4m3. Rows lie in memory as in bfloat16, except for the order within every 16 columns: word w of their 16
// bytes has columns 2 w, 2 w + 8, 2 w + 1 and 2 w + 9. Even bytes are then one register of what a tensor core takes of
// 16 columns, and odd bytes the other.
struct Float8 {
  std::uint8_t bits;
};

// Four float8 weights as bfloat16, the even and the odd bytes, two in a register, exactly. Moved to their places in a
// bfloat16, sign, exponent and mantissa are the number times 2^-120, subnormal ones included.
__device__ __forceinline__ void unpack_four(std::uint32_t four, std::uint32_t& even, std::uint32_t& odd) {
  const auto unpack = [](std::uint32_t moved, std::uint32_t signs) {
    constexpr std::uint32_t kScale = 0x7B807B80;  // 2^120, twice
    constexpr std::uint32_t kMinusZero = 0x80008000;
    return multiply_add_pairs((moved & 0x07F007F0U) | (signs & 0x80008000U), kScale, kMinusZero);
  };
  even = unpack(four << 4U, four << 8U);
  odd = unpack(four >> 4U, four);
}

// The power of 2 whose bits have byte `place` of `exponents` as their exponent.
__device__ __forceinline__ float power_of(std::uint32_t exponents, int place) {
  return __uint_as_float(exponents >> 8 * place << 24 >> 1);
}

// Two bfloat16 in a 32-bit register, `low` in the lower half: the element with the smaller index.
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// The elements in 16 bytes, which a thread loads at once.
template <typename Scalar>
struct Vec16 {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(Scalar));
  uint4 bits;

  __device__ __forceinline__ float operator[](int i) const {
    return to_float(reinterpret_cast<const Scalar*>(&bits)[i]);
  }
};

// Four adjacent floats, read from L2, past L1: another launch wrote them, perhaps while this one was already running,
// and they are used only once.
__device__ __forceinline__ float4 load_shared_floats(const float* source) {
  return __ldcg(reinterpret_cast<const float4*>(source));
}

// silu(gate) * up, with silu(x) = x / (1 + exp(-x)).
__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0F + expf(-gate)) * up; }

// The same, to about 2 units in the last place of a float, in a third of the instructions, where the result is rounded
// to bfloat16.
template <typename Scalar>
__device__ __forceinline__ float gated_for(float gate, float up) {
  if constexpr (sizeof(Scalar) == 4) {
    return gated(gate, up);
  } else {
    constexpr float kLog2E = 1.4426950408889634F;
    return __fdividef(gate, 1.0F + exp2_fast(-kLog2E * gate)) * up;
  }
}

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFU, value, distance);
  }
  return value;
}

}  // namespace common
