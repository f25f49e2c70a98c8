// float16 and float8 (e4m3) on the executor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/cuda/executor/cuda_on_host.h"

// NOLINTBEGIN(readability-identifier-naming,performance-unnecessary-value-param): names and parameters are CUDA's

namespace common::executor {

// Rounds to a format with mantissa_bits bits of mantissa and the least normal number 2^least_exponent, and returns the
// bits; ties go to the even number. Without sign, and without an upper limit.
inline std::uint32_t round_to_small(float size, int mantissa_bits, int least_exponent) {
  const int exponent = size == 0.0F ? least_exponent : std::max(std::ilogb(size), least_exponent);
  const float units = std::nearbyint(std::ldexp(size, mantissa_bits - exponent));
  return (static_cast<std::uint32_t>(exponent - least_exponent) << mantissa_bits) + static_cast<std::uint32_t>(units);
}

inline std::uint16_t half_of_float(float x) {
  const std::uint32_t sign = std::signbit(x) ? 0x8000U : 0U;
  if (std::isnan(x)) {
    return 0x7FFF;
  }
  const std::uint32_t bits = std::fabs(x) < 65536.0F ? round_to_small(std::fabs(x), 10, -14) : 0x7C00U;
  return static_cast<std::uint16_t>(sign | std::min(bits, 0x7C00U));
}

inline float float_of_half(std::uint32_t bits) {
  const std::uint32_t exponent = bits >> 10U & 31U;
  const std::uint32_t mantissa = bits & 1023U;
  const float size = exponent == 0    ? 0x1p-24F * static_cast<float>(mantissa)
                     : exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                                      : __builtin_bit_cast(float, (exponent + 127 - 15) << 23U | mantissa << 13U);
  return (bits & 0x8000U) != 0 ? -size : size;
}

// Beyond 448: 448.
inline std::uint8_t float8_of_float(float x) {
  const std::uint32_t sign = std::signbit(x) ? 0x80U : 0U;
  if (std::isnan(x)) {
    return 0x7F;
  }
  return static_cast<std::uint8_t>(sign | std::min(round_to_small(std::min(std::fabs(x), 448.0F), 3, -6), 0x7EU));
}

inline float float_of_float8(std::uint32_t bits) {
  const std::uint32_t exponent = bits >> 3U & 15U;
  const std::uint32_t mantissa = bits & 7U;
  const float size = exponent == 15 && mantissa == 7 ? NAN
                     : exponent == 0                 ? 0x1p-9F * static_cast<float>(mantissa)
                                     : __builtin_bit_cast(float, (exponent + 127 - 7) << 23U | mantissa << 20U);
  return (bits & 0x80U) != 0 ? -size : size;
}

// Every float8 is a float16.
inline std::uint16_t half_of_float8(std::uint32_t bits) {
  const std::uint32_t size = bits & 0x7FU;
  if (size < 8U || size == 0x7FU) {  // the exponent is 0, or it is not a number
    return half_of_float(float_of_float8(bits));
  }
  return static_cast<std::uint16_t>((bits & 0x80U) << 8U | (size + ((15U - 7U) << 3U)) << 7U);
}

}  // namespace common::executor

struct __half {
  std::uint16_t bits;
};
struct alignas(4) __half2 {
  __half x;
  __half y;
};
struct alignas(4) __half2_raw {
  std::uint16_t x;
  std::uint16_t y;
};
inline __half2 __floats2half2_rn(float x, float y) {
  return {{common::executor::half_of_float(x)}, {common::executor::half_of_float(y)}};
}
inline float2 __half22float2(__half2 pair) {
  return {common::executor::float_of_half(pair.x.bits), common::executor::float_of_half(pair.y.bits)};
}

using __nv_fp8_storage_t = std::uint8_t;
using __nv_fp8x2_storage_t = std::uint16_t;
enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t /*saturation*/,
                                                     __nv_fp8_interpretation_t /*kind*/) {
  const unsigned high = common::executor::float8_of_float(x.y);
  return static_cast<__nv_fp8x2_storage_t>(high << 8U | common::executor::float8_of_float(x.x));
}
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t /*saturation*/,
                                                __nv_fp8_interpretation_t /*kind*/) {
  return common::executor::float8_of_float(x);
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t pair, __nv_fp8_interpretation_t /*kind*/) {
  return {common::executor::half_of_float8(pair & 0xFFU), common::executor::half_of_float8(pair >> 8U)};
}

// NOLINTEND(readability-identifier-naming,performance-unnecessary-value-param)
