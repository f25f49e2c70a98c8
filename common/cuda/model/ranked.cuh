// Numbers that find the largest float together with its place.
#pragma once

namespace common {

// A float, not NaN, and its index as one number that is larger for a larger float and, on a tie, for a lower index.
// (~0ULL stands for NaN.)
__device__ __forceinline__ unsigned long long ranked(float value, unsigned index) {
  unsigned bits = __float_as_uint(value + 0.0F);  // -0 equals 0
  bits = bits >> 31 != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<unsigned long long>(bits) << 32 | ~index;
}

// The float of such a number. Of 0, which is below all of them: -infinity.
__device__ __forceinline__ float value_of_rank(unsigned long long rank) {
  const auto bits = static_cast<unsigned>(rank >> 32);
  return rank == 0 ? -INFINITY : __uint_as_float(bits >> 31 != 0 ? bits & 0x7FFFFFFFU : ~bits);
}

}  // namespace common
