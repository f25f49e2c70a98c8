// Sixteen numbers at once, for unpacking quantised weights. With g++ and clang these are the compiler's own vectors,
// which become the widest registers that the target has, or several narrower ones. Any other compiler, or
// -DCOMMON_PLAIN_LANES, gets an array and loops: the same results, slower where the loops are not vectorised.
//
// Functions take and give lanes by reference: a vector wider than the target's registers has no settled calling
// convention.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if (defined(__AVX512F__) || defined(__F16C__)) && !defined(COMMON_PLAIN_LANES)
#include <immintrin.h>
#endif

namespace common {

constexpr std::size_t kNumLanes = 16;

// What the products compute with: one AVX-512 register, or two or four of a smaller machine.
using Packet = Eigen::Array<float, kNumLanes, 1>;

// The float that a float16 is. With exponent and mantissa shifted to where a float has them, the value is too small by
// a factor of 2^112 (112 = 127 - 15), for subnormal numbers as well. NaN keeps its payload.
inline float float_of_half(std::uint16_t half) {
#if defined(__F16C__) && !defined(COMMON_PLAIN_LANES)
  return _cvtsh_ss(half);
#else
  const std::uint32_t magnitude = half & 0x7FFFU;
  const float finite = std::bit_cast<float>(magnitude << 13U) * 0x1p112F;
  const std::uint32_t infinite_or_nan = magnitude >= 0x7C00U ? 0x7F800000U : 0U;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16U;
  return std::bit_cast<float>(sign | infinite_or_nan | std::bit_cast<std::uint32_t>(finite));
#endif
}

#if defined(__GNUC__) && !defined(COMMON_PLAIN_LANES)

using Integers [[gnu::vector_size(4 * kNumLanes)]] = std::int32_t;

namespace lanes {
using Floats [[gnu::vector_size(4 * kNumLanes)]] = float;
using Bytes [[gnu::vector_size(kNumLanes)]] = std::uint8_t;
using SignedBytes [[gnu::vector_size(kNumLanes)]] = std::int8_t;
using Halves [[gnu::vector_size(2 * kNumLanes)]] = std::uint16_t;
using SignedHalves [[gnu::vector_size(2 * kNumLanes)]] = std::int16_t;

// In two steps, each of which doubles the width: g++ widens to four times the width one lane after the other.
template <typename Narrow, typename Between>
inline void load(const void* data, Integers& out) {
  Narrow narrow;
  std::memcpy(&narrow, data, sizeof narrow);
  out = __builtin_convertvector(__builtin_convertvector(narrow, Between), Integers);
}

inline void store(const Floats& floats, Packet& out) { std::memcpy(out.data(), &floats, sizeof floats); }
}  // namespace lanes

// Sixteen small integers, from memory that need not be aligned. Here are the only intrinsics: g++ 12 makes eight
// instructions of what is one.
#ifdef __AVX512F__
inline void load_uint8(const std::uint8_t* data, Integers& out) {
  out = reinterpret_cast<Integers>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data))));
}
inline void load_int8(const std::uint8_t* data, Integers& out) {
  out = reinterpret_cast<Integers>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data))));
}
inline void load_uint16(const std::uint8_t* data, Integers& out) {
  out = reinterpret_cast<Integers>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data))));
}
#else
inline void load_uint8(const std::uint8_t* data, Integers& out) { lanes::load<lanes::Bytes, lanes::Halves>(data, out); }
inline void load_int8(const std::uint8_t* data, Integers& out) {
  lanes::load<lanes::SignedBytes, lanes::SignedHalves>(data, out);
}
inline void load_uint16(const std::uint8_t* data, Integers& out) {
  lanes::load<lanes::Halves, lanes::Halves>(data, out);
}
#endif

// Lane i is bit i of `bits`.
inline void spread_bits(std::uint32_t bits, Integers& out) {
  constexpr Integers kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  out = ((Integers{} + static_cast<std::int32_t>(bits)) >> kLane) & 1;
}

// Lane i is table[index of lane i], for indices from 0 to 15.
inline void look_up(const std::array<std::int32_t, kNumLanes>& table, const Integers& index, Integers& out) {
  Integers values;
  std::memcpy(&values, table.data(), sizeof values);
#ifdef __clang__
  for (std::size_t i = 0; i < kNumLanes; ++i) {
    out[i] = values[index[i]];
  }
#else
  out = __builtin_shuffle(values, index);
#endif
}

// scale * integers
inline void scale_lanes(const Integers& integers, float scale, Packet& out) {
  lanes::store(__builtin_convertvector(integers, lanes::Floats) * scale, out);
}

// scale * integers + offset. The product has to be exact: whether it is rounded is then no question.
inline void scale_lanes(const Integers& integers, float scale, float offset, Packet& out) {
  lanes::store(__builtin_convertvector(integers, lanes::Floats) * scale + offset, out);
}

// scale * q + offset for the low nibbles q of 16 bytes, or for the high ones. AVX-512 looks them up among the sixteen
// possible results.
inline void scale_nibbles(const std::uint8_t* data, bool high, float scale, float offset, Packet& out) {
  Integers both;
  load_uint8(data, both);
#ifdef __AVX512F__
  constexpr lanes::Floats kNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto index = reinterpret_cast<__m512i>(high ? both >> 4 : both);  // only the lowest four bits count
  const auto results = reinterpret_cast<__m512>(kNumbers * scale + offset);
  _mm512_store_ps(out.data(), _mm512_permutexvar_ps(index, results));
#else
  scale_lanes(high ? both >> 4 : both & 0xF, scale, offset, out);
#endif
}

// The floats that have these bits, and the other way round.
inline void floats_of_bits(const Integers& bits, Packet& out) { std::memcpy(out.data(), &bits, sizeof bits); }
inline void bits_of_floats(const Packet& floats, Integers& out) { std::memcpy(&out, floats.data(), sizeof out); }

#else

struct Integers {
  std::array<std::int32_t, kNumLanes> lane{};

  std::int32_t operator[](std::size_t i) const { return lane[i]; }
  template <typename Operation>
  friend Integers each(const Integers& a, Operation operation) {
    Integers result;
    for (std::size_t i = 0; i < kNumLanes; ++i) {
      result.lane[i] = operation(a.lane[i], i);
    }
    return result;
  }
  friend Integers operator&(const Integers& a, std::int32_t b) {
    return each(a, [b](std::int32_t x, std::size_t) { return x & b; });
  }
  friend Integers operator+(const Integers& a, std::int32_t b) {
    return each(a, [b](std::int32_t x, std::size_t) { return x + b; });
  }
  friend Integers operator-(const Integers& a, std::int32_t b) { return a + -b; }
  friend Integers operator<<(const Integers& a, int b) {
    return each(a, [b](std::int32_t x, std::size_t) { return x << b; });
  }
  friend Integers operator>>(const Integers& a, int b) {
    return each(a, [b](std::int32_t x, std::size_t) { return x >> b; });
  }
  friend Integers operator|(const Integers& a, const Integers& b) {
    return each(a, [&b](std::int32_t x, std::size_t i) { return x | b.lane[i]; });
  }
};

namespace lanes {
template <typename Narrow>
void load(const std::uint8_t* data, Integers& out) {
  std::array<Narrow, kNumLanes> narrow;
  std::memcpy(narrow.data(), data, sizeof narrow);
  std::copy(narrow.begin(), narrow.end(), out.lane.begin());
}
}  // namespace lanes

inline void load_uint8(const std::uint8_t* data, Integers& out) { lanes::load<std::uint8_t>(data, out); }
inline void load_int8(const std::uint8_t* data, Integers& out) { lanes::load<std::int8_t>(data, out); }
inline void load_uint16(const std::uint8_t* data, Integers& out) { lanes::load<std::uint16_t>(data, out); }

inline void spread_bits(std::uint32_t bits, Integers& out) {
  out = each(out, [bits](std::int32_t, std::size_t i) { return static_cast<std::int32_t>(bits >> i & 1U); });
}

inline void look_up(const std::array<std::int32_t, kNumLanes>& table, const Integers& index, Integers& out) {
  out = each(index, [&table](std::int32_t x, std::size_t) { return table[static_cast<std::size_t>(x)]; });
}

inline void scale_lanes(const Integers& integers, float scale, Packet& out) {
  for (std::size_t i = 0; i < kNumLanes; ++i) {
    out(static_cast<Eigen::Index>(i)) = static_cast<float>(integers[i]) * scale;
  }
}

inline void scale_lanes(const Integers& integers, float scale, float offset, Packet& out) {
  for (std::size_t i = 0; i < kNumLanes; ++i) {
    out(static_cast<Eigen::Index>(i)) = static_cast<float>(integers[i]) * scale + offset;
  }
}

inline void scale_nibbles(const std::uint8_t* data, bool high, float scale, float offset, Packet& out) {
  Integers both;
  load_uint8(data, both);
  scale_lanes(high ? both >> 4 : both & 0xF, scale, offset, out);
}

inline void floats_of_bits(const Integers& bits, Packet& out) {
  std::memcpy(out.data(), bits.lane.data(), sizeof bits.lane);
}

inline void bits_of_floats(const Packet& floats, Integers& out) {
  std::memcpy(out.lane.data(), floats.data(), sizeof out.lane);
}

#endif

}  // namespace common
