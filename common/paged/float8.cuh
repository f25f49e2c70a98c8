// Float8 as K and V are stored: e4m3, and a scale for each token and head.
//
// e4m3 has a sign, 4 bits of exponent and 3 of mantissa. Its numbers are 1 to 1.875 in steps of 1/8, times 2^-6 … 2^8,
// up to 448; below 2^-6 the multiples of 2^-9, with 0; and one NaN (with either sign), but no infinity. So rounding
// changes a number between 2^-6 and 448, a range of 15 powers of 2, by at most 1/16 of itself.
//
// A row, one token's K or V of one head, is divided by a scale of its own, so that its largest element lies between 224
// and 448. The scale is known when the row is written, so nothing is measured beforehand, and no later token
// changes it. The scale is a power of 2: it moves exponents and rounds nothing. More digits would not help, because a
// floating-point number is as precise just above a power of 2 as elsewhere. So a scale is one byte, a float32's
// exponent (known as e8m0), and the value of an element, e4m3 times scale, is exactly a bfloat16 number.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/cuda/model/scalars.cuh"
#include "common/paged/element.h"

namespace common {

// The scale of a row whose largest absolute value is `largest`: the smallest power of 2 with largest <= 448 scale. 448
// is 1.75 times 2^8, so if the mantissa is above 1.75, the scale is 2^(exponent - 7), else 2^(exponent - 8). It is at
// least 2^-40, so that a sum of weights in units of V's scale stays far from float32's limit (decode_kernel.cuh). The
// result is the stored exponent of a float32, 127 above the power. Infinity and NaN give 255, which is no scale.
__device__ __forceinline__ std::uint32_t scale_bits(float largest) {
  constexpr std::uint32_t kSmallest = 127 - 40;
  const std::uint32_t bits = __float_as_uint(largest);
  const std::uint32_t exponent = bits >> 23;
  if (exponent == 255) {
    return 255;
  }
  const std::uint32_t needed = exponent + ((bits & 0x7FFFFF) > 0x600000 ? 1 : 0);
  return needed < kSmallest + 8 ? kSmallest : needed - 8;
}

__device__ __forceinline__ float scale_of(std::uint32_t bits) { return __uint_as_float(bits << 23); }

// 1 / scale; 0 if the bits are no scale.
__device__ __forceinline__ float inverse_scale(std::uint32_t bits) {
  return __uint_as_float((254 - min(bits, 254U)) << 23);
}

// Rounds four numbers, already divided by their scale, to nearest, ties to even; the first becomes the lowest byte.
__device__ __forceinline__ std::uint32_t pack_float8(float a, float b, float c, float d) {
  const std::uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  const std::uint32_t high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// The largest absolute value of 16 elements, as the bits of a float32: compared as bits, a NaN is above all numbers.
__device__ __forceinline__ std::uint32_t largest_bits(const common::Vec16<Element> (&vecs)[2]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    largest = max(largest, __float_as_uint(fabsf(vecs[i / 8][i % 8])));
  }
  return largest;
}

__device__ __forceinline__ uint4 to_float8(const common::Vec16<Element> (&vecs)[2], float factor) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const common::Vec16<Element>& vec = vecs[i / 2];
    const int first = i % 2 * 4;
    words[i] =
        pack_float8(vec[first] * factor, vec[first + 1] * factor, vec[first + 2] * factor, vec[first + 3] * factor);
  }
  return {words[0], words[1], words[2], words[3]};
}

// The lower two of four bytes, or the upper two, as two float16: exact, and one instruction since Ada.
__device__ __forceinline__ std::uint32_t lower_halves(std::uint32_t bytes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ __forceinline__ std::uint32_t upper_halves(std::uint32_t bytes) { return lower_halves(bytes >> 16); }

// Bytes kFirst and kFirst + 1 of four, as two bfloat16 times a scale, exactly, in four instructions. Sign, exponent and
// mantissa of e4m3, moved to their places in a bfloat16, are the number times 2^-120, subnormal ones included: a byte,
// extended by its sign, is shifted by four, and the copies of the sign below the first are cleared. `factor` is 2^120
// times the scale, twice. That is a bfloat16 up to a scale of 2^7.
inline constexpr std::uint32_t kMaxFactorScale = 127 + 7;
__device__ __forceinline__ std::uint32_t scale_factor(std::uint32_t scale) { return (scale + 120) * 0x00800080U; }
template <int kFirst>
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t bytes, std::uint32_t factor) {
  constexpr std::uint32_t kMinusZero = 0x80008000;
  return common::multiply_add_pairs(common::extend_bytes<kFirst>(bytes) << 4U & 0x87F087F0U, factor, kMinusZero);
}

// The same for any scale, and NaN stays NaN: in six instructions or seven, on Hopper.
__device__ __forceinline__ std::uint32_t scaled_halves(std::uint32_t halves, float scale) {
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(halves));
  return common::pack(pair.x * scale, pair.y * scale);
}

// The values of 16 bytes of a row, as bfloat16: the first 8, then the last 8. Unless kAnyScale, scale (its bits) is at
// most kMaxFactorScale.
template <bool kAnyScale>
__device__ __forceinline__ void to_bfloat16(uint4 (&to)[2], uint4 bytes, std::uint32_t scale) {
  const auto convert = [&](std::uint32_t four, std::uint32_t& first, std::uint32_t& second) {
    if constexpr (kAnyScale) {
      first = scaled_halves(lower_halves(four), scale_of(scale));
      second = scaled_halves(upper_halves(four), scale_of(scale));
    } else {
      first = scaled_pair<0>(four, scale_factor(scale));
      second = scaled_pair<2>(four, scale_factor(scale));
    }
  };
  convert(bytes.x, to[0].x, to[0].y);
  convert(bytes.y, to[0].z, to[0].w);
  convert(bytes.z, to[1].x, to[1].y);
  convert(bytes.w, to[1].z, to[1].w);
}
__device__ __forceinline__ void to_bfloat16(uint4 (&to)[2], uint4 bytes, std::uint32_t scale) {
  scale <= kMaxFactorScale ? to_bfloat16<false>(to, bytes, scale) : to_bfloat16<true>(to, bytes, scale);
}

// Two float16 in a register, `low` in the lower half.
__device__ __forceinline__ std::uint32_t pack_halves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// Two bfloat16 as two float16: exact for numbers from 2^-14 on; numbers from 65,536 on become infinite.
__device__ __forceinline__ std::uint32_t to_halves(std::uint32_t pair) {
  const float2 numbers = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  return pack_halves(numbers.x, numbers.y);
}

}  // namespace common
