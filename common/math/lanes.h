// Sixteen numbers at once, for products and for unpacking quantised weights. With g++ and clang these are the
// compiler's own vectors, which become the widest registers that the target has, or several narrower ones. Any other
// compiler, or -DCOMMON_PLAIN_LANES, gets an array and loops: the same results, slower where the loops are not
// vectorised.
//
// Functions pass lanes by reference: a vector wider than the target's registers has no fixed calling convention.
//
// No library takes its place; two were tried, with AVX2 and on one core. With the same inlining, Highway 1.0.3 (Debian
// 12) takes as long as this for products of quantised weights, 1.2 times as long for float16, and a quarter of the time
// for one query's weights times values; but it needs AVX-512's look-ups by hand, and has no target for SSE2, where Q6_K
// takes 3.5 to 6 times as long. xsimd 8.1 takes up to 10 times as long: it widens small integers one by one.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if (defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)) && !defined(COMMON_PLAIN_LANES)
#include <immintrin.h>
#endif

namespace common {

constexpr std::size_t kNumLanes = 16;

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

#if defined(__GNUC__) && defined(__AVX2__) && !defined(__AVX512F__) && !defined(COMMON_PLAIN_LANES)

namespace lanes {
using EightFloats [[gnu::vector_size(32)]] = float;
using EightIntegers [[gnu::vector_size(32)]] = std::int32_t;

// Two registers of eight lanes. g++ keeps a vector that is wider than a register in memory, and so every sum in a loop.
template <typename Number, typename Eight>
struct Pair {
  using Register = Eight;
  std::array<Register, 2> half;

  Number operator[](std::size_t i) const { return half[i / 8][i % 8]; }
  friend Pair operator+(const Pair& a, Number b) { return {{a.half[0] + b, a.half[1] + b}}; }
  friend Pair operator-(const Pair& a, Number b) { return {{a.half[0] - b, a.half[1] - b}}; }
  friend Pair operator*(const Pair& a, Number b) { return {{a.half[0] * b, a.half[1] * b}}; }
  friend Pair operator&(const Pair& a, Number b) { return {{a.half[0] & b, a.half[1] & b}}; }
  friend Pair operator<<(const Pair& a, int b) { return {{a.half[0] << b, a.half[1] << b}}; }
  friend Pair operator>>(const Pair& a, int b) { return {{a.half[0] >> b, a.half[1] >> b}}; }
  friend Pair operator|(const Pair& a, const Pair& b) { return {{a.half[0] | b.half[0], a.half[1] | b.half[1]}}; }
  friend Pair operator+(const Pair& a, const Pair& b) { return {{a.half[0] + b.half[0], a.half[1] + b.half[1]}}; }
  friend Pair operator*(const Pair& a, const Pair& b) { return {{a.half[0] * b.half[0], a.half[1] * b.half[1]}}; }
  Pair& operator+=(const Pair& b) { return *this = *this + b; }
  Pair& operator*=(Number b) { return *this = *this * b; }
};
}  // namespace lanes

using Packet = lanes::Pair<float, lanes::EightFloats>;
using Integers = lanes::Pair<std::int32_t, lanes::EightIntegers>;

inline void load_uint8(const std::uint8_t* data, Integers& out) {
  for (std::size_t i = 0; i < 2; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + 8 * i));
    out.half[i] = reinterpret_cast<Integers::Register>(_mm256_cvtepu8_epi32(bytes));
  }
}
inline void load_int8(const std::uint8_t* data, Integers& out) {
  for (std::size_t i = 0; i < 2; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + 8 * i));
    out.half[i] = reinterpret_cast<Integers::Register>(_mm256_cvtepi8_epi32(bytes));
  }
}
inline void load_uint16(const std::uint8_t* data, Integers& out) {
  for (std::size_t i = 0; i < 2; ++i) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i));
    out.half[i] = reinterpret_cast<Integers::Register>(_mm256_cvtepu16_epi32(halves));
  }
}

inline void shift_by_lane(std::uint32_t bits, Integers& out) {
  constexpr Integers::Register kLane = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto number = static_cast<std::int32_t>(bits);
  out.half[0] = (Integers::Register{} + number) >> kLane;
  out.half[1] = (Integers::Register{} + number) >> (kLane + 8);
}

inline void look_up(const std::array<std::int32_t, kNumLanes>& table, const Integers& index, Integers& out) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table.data()));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table.data() + 8));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto at = reinterpret_cast<__m256i>(index.half[i]);
    const __m256i is_high = _mm256_cmpgt_epi32(at, _mm256_set1_epi32(7));
    out.half[i] = reinterpret_cast<Integers::Register>(
        _mm256_blendv_epi8(_mm256_permutevar8x32_epi32(low, at), _mm256_permutevar8x32_epi32(high, at), is_high));
  }
}

inline void to_floats(const Integers& integers, Packet& out) {
  for (std::size_t i = 0; i < 2; ++i) {
    out.half[i] = __builtin_convertvector(integers.half[i], Packet::Register);
  }
}

// The floats that have these bits, and the bits that these floats have.
inline void floats_of_bits(const Integers& bits, Packet& out) {
  for (std::size_t i = 0; i < 2; ++i) {
    out.half[i] = reinterpret_cast<Packet::Register>(bits.half[i]);
  }
}
inline void bits_of_floats(const Packet& floats, Integers& out) {
  for (std::size_t i = 0; i < 2; ++i) {
    out.half[i] = reinterpret_cast<Integers::Register>(floats.half[i]);
  }
}

#elif defined(__GNUC__) && !defined(COMMON_PLAIN_LANES)

// One AVX-512 register, or four of a smaller machine.
using Packet [[gnu::vector_size(4 * kNumLanes)]] = float;
using Integers [[gnu::vector_size(4 * kNumLanes)]] = std::int32_t;

namespace lanes {
using Bytes [[gnu::vector_size(kNumLanes)]] = std::uint8_t;
using SignedBytes [[gnu::vector_size(kNumLanes)]] = std::int8_t;
using Halves [[gnu::vector_size(2 * kNumLanes)]] = std::uint16_t;
using SignedHalves [[gnu::vector_size(2 * kNumLanes)]] = std::int16_t;
using Words [[gnu::vector_size(kNumLanes)]] = std::uint32_t;

// Each of two steps doubles the width: in a single step, g++ would widen one lane after the other.
template <typename Narrow, typename Between>
inline void widen(const void* data, Integers& out) {
  Narrow narrow;
  std::memcpy(&narrow, data, sizeof narrow);
  out = __builtin_convertvector(__builtin_convertvector(narrow, Between), Integers);
}
}  // namespace lanes

// Sixteen small integers, from memory that need not be aligned. g++ 12 makes eight instructions where one is enough.
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
inline void load_uint8(const std::uint8_t* data, Integers& out) {
  lanes::widen<lanes::Bytes, lanes::Halves>(data, out);
}
inline void load_int8(const std::uint8_t* data, Integers& out) {
  lanes::widen<lanes::SignedBytes, lanes::SignedHalves>(data, out);
}
inline void load_uint16(const std::uint8_t* data, Integers& out) {
  lanes::widen<lanes::Halves, lanes::Halves>(data, out);
}
#endif

// Lane i is bits >> i, so that bit i is its lowest.
inline void shift_by_lane(std::uint32_t bits, Integers& out) {
  constexpr Integers kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  out = (Integers{} + static_cast<std::int32_t>(bits)) >> kLane;
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

inline void to_floats(const Integers& integers, Packet& out) { out = __builtin_convertvector(integers, Packet); }

// The floats that have these bits, and the bits that these floats have.
inline void floats_of_bits(const Integers& bits, Packet& out) { std::memcpy(&out, &bits, sizeof out); }
inline void bits_of_floats(const Packet& floats, Integers& out) { std::memcpy(&out, &floats, sizeof out); }

#else

namespace lanes {
// Numbers with the operations of the compilers' vectors that are used here.
template <typename Number>
struct Array {
  std::array<Number, kNumLanes> lane;

  Number operator[](std::size_t i) const { return lane[i]; }
  template <typename Operation>
  friend Array each(const Array& a, Operation operation) {
    Array result;
    for (std::size_t i = 0; i < kNumLanes; ++i) {
      result.lane[i] = operation(a.lane[i], i);
    }
    return result;
  }
  friend Array operator+(const Array& a, Number b) {
    return each(a, [b](Number x, std::size_t) { return x + b; });
  }
  friend Array operator-(const Array& a, Number b) {
    return each(a, [b](Number x, std::size_t) { return x - b; });
  }
  friend Array operator*(const Array& a, Number b) {
    return each(a, [b](Number x, std::size_t) { return x * b; });
  }
  friend Array operator&(const Array& a, Number b) {
    return each(a, [b](Number x, std::size_t) { return x & b; });
  }
  friend Array operator<<(const Array& a, int b) {
    return each(a, [b](Number x, std::size_t) { return x << b; });
  }
  friend Array operator>>(const Array& a, int b) {
    return each(a, [b](Number x, std::size_t) { return x >> b; });
  }
  friend Array operator|(const Array& a, const Array& b) {
    return each(a, [&b](Number x, std::size_t i) { return x | b.lane[i]; });
  }
  friend Array operator+(const Array& a, const Array& b) {
    return each(a, [&b](Number x, std::size_t i) { return x + b.lane[i]; });
  }
  friend Array operator*(const Array& a, const Array& b) {
    return each(a, [&b](Number x, std::size_t i) { return x * b.lane[i]; });
  }
  Array& operator+=(const Array& b) { return *this = *this + b; }
  Array& operator*=(Number b) { return *this = *this * b; }
};

template <typename Narrow, typename Number>
void widen(const std::uint8_t* data, Array<Number>& out) {
  std::array<Narrow, kNumLanes> narrow;
  std::memcpy(narrow.data(), data, sizeof narrow);
  std::copy(narrow.begin(), narrow.end(), out.lane.begin());
}
}  // namespace lanes

using Packet = lanes::Array<float>;
using Integers = lanes::Array<std::int32_t>;

inline void load_uint8(const std::uint8_t* data, Integers& out) { lanes::widen<std::uint8_t>(data, out); }
inline void load_int8(const std::uint8_t* data, Integers& out) { lanes::widen<std::int8_t>(data, out); }
inline void load_uint16(const std::uint8_t* data, Integers& out) { lanes::widen<std::uint16_t>(data, out); }

inline void shift_by_lane(std::uint32_t bits, Integers& out) {
  out = each(out, [bits](std::int32_t, std::size_t i) { return static_cast<std::int32_t>(bits >> i); });
}

inline void look_up(const std::array<std::int32_t, kNumLanes>& table, const Integers& index, Integers& out) {
  out = each(index, [&table](std::int32_t x, std::size_t) { return table[static_cast<std::size_t>(x)]; });
}

inline void to_floats(const Integers& integers, Packet& out) {
  std::copy(integers.lane.begin(), integers.lane.end(), out.lane.begin());
}

inline void floats_of_bits(const Integers& bits, Packet& out) { std::memcpy(&out, &bits, sizeof out); }
inline void bits_of_floats(const Packet& floats, Integers& out) { std::memcpy(&out, &floats, sizeof out); }

#endif

// Lane i is byte i of the four words, each word's lowest byte first. Through memory, narrow writes followed by one wide
// read would stall the processor.
inline void spread_bytes(const std::array<std::uint32_t, 4>& words, Integers& out) {
#if defined(__AVX512F__) && !defined(COMMON_PLAIN_LANES)
  const lanes::Words packed = {words[0], words[1], words[2], words[3]};
  out = reinterpret_cast<Integers>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(packed)));
#else
  std::array<std::uint8_t, kNumLanes> bytes{};
  std::memcpy(bytes.data(), words.data(), sizeof bytes);
  load_uint8(bytes.data(), out);
#endif
}

// Floats in memory need not be aligned.
template <typename Lanes>
inline void load(const float* data, Lanes& out) {
  if constexpr (requires { out.half; }) {
    // As one, g++ may copy them in smaller pieces, through memory.
    std::memcpy(&out.half[0], data, sizeof out.half[0]);
    std::memcpy(&out.half[1], data + kNumLanes / 2, sizeof out.half[1]);
  } else {
    std::memcpy(&out, data, sizeof out);
  }
}
inline void store(const Packet& packet, float* data) { std::memcpy(data, &packet, sizeof packet); }

inline float sum_of(const Packet& packet) {
  Eigen::Array<float, kNumLanes, 1> floats;
  store(packet, floats.data());
  return floats.sum();
}

// scale * integers
inline void scale_lanes(const Integers& integers, float scale, Packet& out) {
  to_floats(integers, out);
  out = out * scale;
}

// scale * integers + offset. The product has to be exact, so that it does not matter whether the compiler rounds it.
inline void scale_lanes(const Integers& integers, float scale, float offset, Packet& out) {
  to_floats(integers, out);
  out = out * scale + offset;
}

// Lane i has the bits of `ones` where `mask` has a one, and the bits of `zeros` elsewhere.
inline void select_bits(std::int32_t mask, const Integers& ones, const Integers& zeros, Integers& out) {
#if defined(__AVX512F__) && !defined(COMMON_PLAIN_LANES)
  // g++ 12 makes two instructions where one is enough.
  out = reinterpret_cast<Integers>(_mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), reinterpret_cast<__m512i>(ones),
                                                             reinterpret_cast<__m512i>(zeros), 0xCA));
#else
  out = (ones & mask) | (zeros & ~mask);
#endif
}

// For each lane, a result that depends only on the lane's lowest kBits bits, four or five; the bits above may be
// anything. number(lane, q) turns a lane into a number q, for one integer or for sixteen; result(numbers, out) turns
// sixteen numbers into results.
//
// AVX-512 computes the 16 or 32 possible results and looks up each lane's: its instruction reads only these bits. Other
// machines compute each lane's result.
template <int kBits, typename Number, typename Result>
inline void map_low_bits(const Integers& lanes, const Number& number, const Result& result, Packet& out) {
  static_assert(kBits == 4 || kBits == 5);
#if defined(__AVX512F__) && !defined(COMMON_PLAIN_LANES)
  const auto results = [&](int first) {
    Integers numbers;
    for (int i = 0; i < static_cast<int>(kNumLanes); ++i) {
      std::int32_t q = 0;
      number(first + i, q);
      numbers[i] = q;
    }
    Packet packet;
    result(numbers, packet);
    return reinterpret_cast<__m512>(packet);
  };
  const auto index = reinterpret_cast<__m512i>(lanes);
  if constexpr (kBits == 4) {
    out = reinterpret_cast<Packet>(_mm512_permutexvar_ps(index, results(0)));
  } else {
    out = reinterpret_cast<Packet>(_mm512_permutex2var_ps(results(0), index, results(16)));
  }
#else
  Integers numbers;
  number(lanes, numbers);
  result(numbers, out);
#endif
}

// scale * q, and scale * q + offset.
template <int kBits, typename Number>
inline void scale_low_bits(const Integers& lanes, const Number& number, float scale, Packet& out) {
  map_low_bits<kBits>(
      lanes, number, [&](const Integers& q, Packet& result) { scale_lanes(q, scale, result); }, out);
}
template <int kBits, typename Number>
inline void scale_low_bits(const Integers& lanes, const Number& number, float scale, float offset, Packet& out) {
  const auto scaled = [&](const Integers& q, Packet& result) { scale_lanes(q, scale, offset, result); };
  map_low_bits<kBits>(lanes, number, scaled, out);
}

// Covers rows by kernels that hold the sums of up to four of them in registers: calls run(count, row) for four rows at
// a time, and once for the rows that are left. count is a constant, for a template's argument.
template <typename Run>
inline void by_rows(Eigen::Index num_rows, const Run& run) {
  Eigen::Index row = 0;
  for (; row + 4 <= num_rows; row += 4) {
    run(std::integral_constant<int, 4>(), row);
  }
  switch (num_rows - row) {
    case 3:
      return run(std::integral_constant<int, 3>(), row);
    case 2:
      return run(std::integral_constant<int, 2>(), row);
    case 1:
      return run(std::integral_constant<int, 1>(), row);
    default:
      return;
  }
}

}  // namespace common
