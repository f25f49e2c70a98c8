// CUDA C++'s own words for the host's compiler, as far as the kernels of this repository use them. The headers of
// include/ have the names of the CUDA Toolkit's and lead here: a build for the executor finds them in place of the
// toolkit's, and needs none.
#pragma once

#include <math.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cuda/executor/executor.h"
#include "common/cuda/executor/warp.h"

// NOLINTBEGIN(readability-identifier-naming): the names are CUDA's

#define COURSE_EXECUTOR 1

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace common::executor {

// threadIdx.x and the like: reading one asks the executor.
template <Index3 (*of)(), unsigned Index3::*part>
struct Coordinate {
  operator unsigned() const { return of().*part; }  // NOLINT(google-explicit-constructor): as in CUDA
};
template <Index3 (*of)()>
struct Coordinates {
  [[no_unique_address]] Coordinate<of, &Index3::x> x;
  [[no_unique_address]] Coordinate<of, &Index3::y> y;
  [[no_unique_address]] Coordinate<of, &Index3::z> z;
};

}  // namespace common::executor

inline constexpr common::executor::Coordinates<common::executor::thread_index> threadIdx;
inline constexpr common::executor::Coordinates<common::executor::block_index> blockIdx;
inline constexpr common::executor::Coordinates<common::executor::block_size> blockDim;
inline constexpr common::executor::Coordinates<common::executor::grid_size> gridDim;

// ---- vectors -----------------------------------------------------------------------------------------------------
//
// A GPU moves 8 or 16 bytes with one instruction. The copies below do so too, whatever the optimiser knows about the
// parts: the accesses are counted.

namespace common::executor {

using Bytes8 = unsigned __attribute__((vector_size(8), may_alias));
using Bytes16 = unsigned __attribute__((vector_size(16), may_alias));

template <typename Whole>
void move_whole(Whole* to, const Whole* from) {
  Whole whole = *from;
  asm("" : "+m"(whole));  // to the compiler a new value: it cannot take the parts from where they came from
  *to = whole;
}

template <typename T>
struct alignas(2 * sizeof(T)) Two {
  T x;
  T y;
  Two() = default;
  constexpr Two(T first, T second) : x(first), y(second) {}
  Two(const Two& other) { *this = other; }
  Two& operator=(const Two& other) {
    move_whole(reinterpret_cast<Bytes8*>(this), reinterpret_cast<const Bytes8*>(&other));
    return *this;
  }
};

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T x;
  T y;
  T z;
  T w;
  Four() = default;
  constexpr Four(T first, T second, T third, T fourth) : x(first), y(second), z(third), w(fourth) {}
  Four(const Four& other) { *this = other; }
  Four& operator=(const Four& other) {
    move_whole(reinterpret_cast<Bytes16*>(this), reinterpret_cast<const Bytes16*>(&other));
    return *this;
  }
};

}  // namespace common::executor

using int2 = common::executor::Two<int>;
using uint2 = common::executor::Two<unsigned>;
using float2 = common::executor::Two<float>;
using int4 = common::executor::Four<int>;
using uint4 = common::executor::Four<unsigned>;
using float4 = common::executor::Four<float>;
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  constexpr dim3(unsigned size_x = 1, unsigned size_y = 1, unsigned size_z = 1)  // NOLINT(google-explicit-constructor)
      : x(size_x), y(size_y), z(size_z) {}
};

// ---- functions ---------------------------------------------------------------------------------------------------

inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0F / sqrtf(x); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }

template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
T __ldcv(const T* from) {
  return *from;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T x) {
  *to = x;
}

// The blocks run one after another, and a thread is not interrupted between two accesses.
template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> x) {
  const T before = *to;
  *to = before + x;
  return before;
}
template <typename T>
T atomicMax(T* to, T x) {
  const T before = *to;
  *to = before < x ? x : before;
  return before;
}
template <typename T>
T atomicOr(T* to, std::type_identity_t<T> x) {
  const T before = *to;
  *to = before | x;
  return before;
}
template <typename T>
T atomicExch(T* to, std::type_identity_t<T> x) {
  const T before = *to;
  *to = x;
  return before;
}
inline void __threadfence() {}
inline void __threadfence_system() {}

inline void __syncthreads() { common::executor::synchronize_block(); }
inline void __syncwarp(unsigned mask = ~0U) { common::executor::synchronize_warp(mask); }

template <typename T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  const int own = common::executor::lane();
  return common::executor::shuffle(mask, x, own / width * width + (lane & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  return common::executor::shuffle(mask, x, common::executor::lane() ^ distance);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, int distance) {
  const int lane = common::executor::lane();
  return common::executor::shuffle(mask, x, lane + distance < 32 ? lane + distance : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, int distance) {
  const int lane = common::executor::lane();
  return common::executor::shuffle(mask, x, lane >= distance ? lane - distance : lane);
}
inline int __reduce_max_sync(unsigned mask, int x) {
  for (int distance = 1; distance < 32; distance *= 2) {
    x = std::max(x, __shfl_xor_sync(mask, x, distance));
  }
  return x;
}
inline unsigned __ballot_sync(unsigned mask, bool vote) { return common::executor::ballot(mask, vote); }
inline bool __any_sync(unsigned mask, bool vote) { return common::executor::ballot(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return common::executor::ballot(mask, !vote) == 0; }

// Byte i of the result is byte `selector`'s i-th digit of the eight bytes of b and a.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{b} << 32U | a;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned digit = selector >> 4U * i & 7U;
    result |= static_cast<unsigned>(bytes >> 8U * digit & 0xFFU) << 8U * i;
  }
  return result;
}

// ---- bfloat16: the upper half of a float -------------------------------------------------------------------------

struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x;
  __nv_bfloat16 y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16U); }

// To the nearest; of two, to the even one. A NaN stays one.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) {
    return {0x7FFF};
  }
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __floats2bfloat162_rn(x, x); }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) * __bfloat162float(b.x),
                               __bfloat162float(a.y) * __bfloat162float(b.y));
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__bfloat162float(pair.x), __bfloat162float(pair.y)}; }

// NOLINTEND(readability-identifier-naming)
