// How the file formats pack weights, and how they are unpacked: into two packets of 16 floats at a time, which stay in
// registers where a product uses them at once.
//
// A format has kElements weights in kBytes bytes, and unpack(block, use), which calls use(pair, first, second) for the
// weights 32 * pair … + 15 and the 16 after them, pair by pair. Scales are float16. Every weight is
//   scale * q   or   scale * q + offset
// with an integer q of few bits, so that scale * q is exact.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "common/base/check.h"
#include "common/math/lanes.h"
#include "common/model/gguf.h"

namespace common::blocks {

// Numbers are copied as they lie in the file, and the file is little-endian.
static_assert(std::endian::native == std::endian::little, "GGUF data is read as little-endian");

inline float half_at(const std::uint8_t* data) {
  std::uint16_t half = 0;
  std::memcpy(&half, data, sizeof half);
  return float_of_half(half);
}

struct F16 {
  static constexpr int kElements = 32;
  static constexpr int kBytes = 64;

  // float_of_half, lane by lane.
  static void convert(const std::uint8_t* data, Packet& out) {
    Integers half;
    load_uint16(data, half);
    const Integers magnitude = half & 0x7FFF;
    floats_of_bits(magnitude << 13, out);
    out *= 0x1p112F;
    Integers finite;
    bits_of_floats(out, finite);
    // Adding 0x400 carries into bit 15 exactly where the exponent has all its bits.
    const Integers infinite_or_nan = (((magnitude + 0x400) << 16) >> 31) & 0x7F800000;
    floats_of_bits(finite | infinite_or_nan | ((half & 0x8000) << 16), out);
  }

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    Packet first;
    Packet second;
    convert(block, first);
    convert(block + 32, second);
    use(0, first, second);
  }
};

struct BF16 {  // the upper half of a float's bits
  static constexpr int kElements = 32;
  static constexpr int kBytes = 64;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    Integers low;
    Integers high;
    load_uint16(block, low);
    load_uint16(block + 32, high);
    Packet first;
    Packet second;
    floats_of_bits(low << 16, first);
    floats_of_bits(high << 16, second);
    use(0, first, second);
  }
};

struct Q8_0 {  // scale, then 32 signed bytes q: scale * q
  static constexpr int kElements = 32;
  static constexpr int kBytes = 34;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    Integers low;
    Integers high;
    load_int8(block + 2, low);
    load_int8(block + 18, high);
    Packet first;
    Packet second;
    scale_lanes(low, scale, first);
    scale_lanes(high, scale, second);
    use(0, first, second);
  }
};

// Of 16 bytes, the low nibbles are weights 0 … 15 of the block and the high ones 16 … 31.
struct Nibbles {
  Integers low;
  Integers high;
  explicit Nibbles(const std::uint8_t* data) {
    Integers both;
    load_uint8(data, both);
    low = both & 0xF;
    high = both >> 4;
  }
};

struct Q4_0 {  // scale, nibbles q: scale * (q - 8)
  static constexpr int kElements = 32;
  static constexpr int kBytes = 18;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    const Nibbles nibbles(block + 2);
    Packet first;
    Packet second;
    scale_lanes(nibbles.low - 8, scale, first);
    scale_lanes(nibbles.high - 8, scale, second);
    use(0, first, second);
  }
};

struct Q4_1 {  // scale, minimum, nibbles q: scale * q + minimum
  static constexpr int kElements = 32;
  static constexpr int kBytes = 20;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    Packet first;
    Packet second;
    scale_nibbles(block + 4, false, scale, minimum, first);
    scale_nibbles(block + 4, true, scale, minimum, second);
    use(0, first, second);
  }
};

// Nibbles with a fifth bit each: bit i of the 32 before them belongs to weight i.
struct FiveBits {
  Integers low;
  Integers high;
  FiveBits(const std::uint8_t* fifth_bits, const std::uint8_t* data) {
    const Nibbles nibbles(data);
    std::uint32_t bits = 0;
    std::memcpy(&bits, fifth_bits, sizeof bits);
    spread_bits(bits & 0xFFFFU, low);
    spread_bits(bits >> 16U, high);
    low = nibbles.low | (low << 4);
    high = nibbles.high | (high << 4);
  }
};

struct Q5_0 {  // scale, fifth bits, nibbles: scale * (q - 16)
  static constexpr int kElements = 32;
  static constexpr int kBytes = 22;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    const FiveBits q(block + 2, block + 6);
    Packet first;
    Packet second;
    scale_lanes(q.low - 16, scale, first);
    scale_lanes(q.high - 16, scale, second);
    use(0, first, second);
  }
};

struct Q5_1 {  // scale, minimum, fifth bits, nibbles: scale * q + minimum
  static constexpr int kElements = 32;
  static constexpr int kBytes = 24;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    const FiveBits q(block + 4, block + 8);
    Packet first;
    Packet second;
    scale_lanes(q.low, scale, minimum, first);
    scale_lanes(q.high, scale, minimum, second);
    use(0, first, second);
  }
};

struct Iq4Nl {  // scale, nibbles that choose one of 16 values: scale * value
  static constexpr int kElements = 32;
  static constexpr int kBytes = 18;
  static constexpr std::array<std::int32_t, 16> kValues = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                           1,    13,   25,  38,  53,  69,  89,  113};

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    const Nibbles nibbles(block + 2);
    Integers low;
    Integers high;
    look_up(kValues, nibbles.low, low);
    look_up(kValues, nibbles.high, high);
    Packet first;
    Packet second;
    scale_lanes(low, scale, first);
    scale_lanes(high, scale, second);
    use(0, first, second);
  }
};

// --- Blocks of 256, with small scales for groups of 16 or 32 in a scale for the block ("K quants") --------------

// What the weights of 16 groups are multiplied with, or what is added to them.
using GroupScales = Packet;

// Calls use(0), use(1), …, each with its own constant, so that shifts by it cost one instruction.
template <int kCount, typename Use>
void unrolled(const Use& use) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) { (use(std::integral_constant<int, kIndex>()), ...); }
  (std::make_integer_sequence<int, kCount>());
}

// Moves bits up by `by`, or down if that is negative.
inline void move_bits(const Integers& bits, int by, Integers& out) { out = by >= 0 ? bits << by : bits >> -by; }

// 16 groups of 16: a byte each, its low nibble the group's scale and its high one the minimum; then 64 bytes of two
// bits a weight; then scale and minimum of the block: scale * group_scale * q - minimum * group_minimum. Of a half's 32
// bytes, bits 0 and 1 are weights 0 … 31, bits 2 and 3 weights 32 … 63, and so on.
struct Q2_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 84;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    Integers both;
    load_uint8(block, both);
    GroupScales scales;
    GroupScales offsets;
    scale_lanes(both & 0xF, half_at(block + 80), scales);
    scale_lanes(both >> 4, -half_at(block + 82), offsets);
    for (int pair = 0; pair < 8; ++pair) {
      const std::uint8_t* const data = block + 16 + pair / 4 * 32;
      const auto group = [&](int second, Packet& out) {
        Integers bits;
        load_uint8(data + 16 * second, bits);
        scale_lanes((bits >> (pair % 4 * 2)) & 3, scales(2 * pair + second), offsets(2 * pair + second), out);
      };
      Packet first;
      Packet second;
      group(0, first);
      group(1, second);
      use(pair, first, second);
    }
  }
};

// 32 bytes with the third bits (bit p of byte i belongs to weight 32 * p + i), 64 bytes of two bits a weight as in
// Q2_K, 16 group scales of six bits in 12 bytes, scale: scale * (group_scale - 32) * (q - 4).
struct Q3_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 110;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    GroupScales scales;
    unpack_scales(block, scales);
    std::array<Integers, 2> third_bits;
    load_uint8(block, third_bits[0]);
    load_uint8(block + 16, third_bits[1]);
    unrolled<2>([&](auto half) {
      std::array<Integers, 2> bits;
      load_uint8(block + 32 + 32 * half, bits[0]);
      load_uint8(block + 48 + 32 * half, bits[1]);
      unrolled<4>([&](auto quarter) {
        constexpr int kPair = 4 * half + quarter;
        std::array<Packet, 2> weights;
        for (std::size_t i = 0; i < 2; ++i) {
          Integers low;
          Integers high;
          move_bits(bits[i], -2 * quarter, low);
          move_bits(third_bits[i], 2 - kPair, high);
          scale_lanes(((low & 3) | (high & 4)) - 4, scales(2 * kPair + static_cast<int>(i)), weights[i]);
        }
        use(kPair, weights[0], weights[1]);
      });
    });
  }

 private:
  // The low four bits of scales 0 … 7 are the low nibbles of the first eight bytes, of 8 … 15 the high ones; the high
  // two bits are in the last four bytes, whose byte i serves the scales i, i + 4, i + 8 and i + 12. Four at a time:
  static void unpack_scales(const std::uint8_t* block, GroupScales& scales) {
    std::array<std::uint32_t, 3> words{};
    std::memcpy(words.data(), block + 96, sizeof words);
    std::array<std::uint32_t, 4> six_bits{};
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t low = words[i % 2] >> (i / 2 * 4) & 0x0F0F0F0FU;
      six_bits[i] = low | (words[2] >> (2 * i) & 0x03030303U) << 4U;
    }
    std::array<std::uint8_t, 16> bytes{};
    std::memcpy(bytes.data(), six_bits.data(), sizeof bytes);
    Integers group_scales;
    load_uint8(bytes.data(), group_scales);
    scale_lanes(group_scales - 32, half_at(block + 108), scales);
  }
};

// 8 groups of 32, each with a scale and a minimum of six bits, which 12 bytes hold: the low six bits of bytes 0 … 3 are
// scales 0 … 3 and of bytes 4 … 7 minimums 0 … 3; bytes 8 … 11 have the low four bits of scales and minimums 4 … 7,
// whose high two bits are those of bytes 0 … 7.
struct SixBitScales {
  std::array<std::uint8_t, 8> scales{};
  std::array<std::uint8_t, 8> minimums{};

  explicit SixBitScales(const std::uint8_t* data) {
    // Four bytes at a time.
    std::array<std::uint32_t, 3> words{};
    std::memcpy(words.data(), data, sizeof words);
    const std::array<std::uint32_t, 2> first = {words[0] & 0x3F3F3F3FU,
                                                (words[2] & 0x0F0F0F0FU) | (words[0] >> 2U & 0x30303030U)};
    const std::array<std::uint32_t, 2> second = {words[1] & 0x3F3F3F3FU,
                                                 (words[2] >> 4U & 0x0F0F0F0FU) | (words[1] >> 2U & 0x30303030U)};
    std::memcpy(scales.data(), first.data(), sizeof first);
    std::memcpy(minimums.data(), second.data(), sizeof second);
  }
};

// scale, minimum, group scales, 128 bytes of nibbles: scale * group_scale * q - minimum * group_minimum. Of 32 bytes,
// the low nibbles are one group and the high ones the next.
struct Q4_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 144;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    const SixBitScales groups(block + 4);
    for (std::size_t two = 0; two < 4; ++two) {
      const std::uint8_t* const data = block + 16 + 32 * two;
      const auto group = [&](std::size_t pair, bool high) {
        const float group_scale = scale * static_cast<float>(groups.scales[pair]);
        const float offset = -minimum * static_cast<float>(groups.minimums[pair]);
        Packet first;
        Packet second;
        scale_nibbles(data, high, group_scale, offset, first);
        scale_nibbles(data + 16, high, group_scale, offset, second);
        use(static_cast<int>(pair), first, second);
      };
      group(2 * two, false);
      group(2 * two + 1, true);
    }
  }
};

// The same with a fifth bit: bit p of 32 bytes before the nibbles belongs to group p.
struct Q5_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 176;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    const float scale = half_at(block);
    const float minimum = half_at(block + 2);
    const SixBitScales groups(block + 4);
    Integers front_bits;
    Integers back_bits;
    load_uint8(block + 16, front_bits);
    load_uint8(block + 32, back_bits);
    for (std::size_t two = 0; two < 4; ++two) {
      const std::uint8_t* const data = block + 48 + 32 * two;
      const Nibbles front(data);
      const Nibbles back(data + 16);
      const auto group = [&](std::size_t pair, const Integers& low, const Integers& high) {
        const auto shift = static_cast<int>(pair);
        const float group_scale = scale * static_cast<float>(groups.scales[pair]);
        const float offset = -minimum * static_cast<float>(groups.minimums[pair]);
        Packet first;
        Packet second;
        scale_lanes(low | (((front_bits >> shift) & 1) << 4), group_scale, offset, first);
        scale_lanes(high | (((back_bits >> shift) & 1) << 4), group_scale, offset, second);
        use(shift, first, second);
      };
      group(2 * two, front.low, back.low);
      group(2 * two + 1, front.high, back.high);
    }
  }
};

// 128 bytes of low nibbles, 64 of the high two bits, 16 signed group scales, scale: scale * group_scale * (q - 32). A
// half of the block is 128 weights in four pairs of 32: pairs 0 and 2 share the half's first 32 bytes of nibbles and
// pairs 1 and 3 the next 32; each of the half's 32 bytes of high bits serves all four pairs.
struct Q6_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 210;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    GroupScales scales;
    Integers group_scales;
    load_int8(block + 192, group_scales);
    scale_lanes(group_scales, half_at(block + 208), scales);
    unrolled<2>([&](auto half) {
      std::array<Integers, 4> low_bits;
      std::array<Integers, 2> high_bits;
      for (std::size_t i = 0; i < 4; ++i) {
        load_uint8(block + 64 * half + 16 * i, low_bits[i]);
      }
      for (std::size_t i = 0; i < 2; ++i) {
        load_uint8(block + 128 + 32 * half + 16 * i, high_bits[i]);
      }
      unrolled<4>([&](auto quarter) {
        constexpr int kPair = 4 * half + quarter;
        std::array<Packet, 2> weights;
        for (std::size_t i = 0; i < 2; ++i) {
          Integers low;
          Integers high;
          move_bits(low_bits[static_cast<std::size_t>(quarter % 2 * 2) + i], quarter < 2 ? 0 : -4, low);
          move_bits(high_bits[i], 4 - 2 * quarter, high);
          scale_lanes(((low & 0xF) | (high & 0x30)) - 32, scales(2 * kPair + static_cast<int>(i)), weights[i]);
        }
        use(kPair, weights[0], weights[1]);
      });
    });
  }
};

// Calls use(format) with the format of a type that has blocks; F32 has none.
template <typename Use>
void with_format(TensorType type, const Use& use) {
  switch (type) {
    case TensorType::F32:
      COMMON_CHECK(false, "F32 has no blocks to unpack");
    case TensorType::F16:
      return use(F16());
    case TensorType::BF16:
      return use(BF16());
    case TensorType::Q8_0:
      return use(Q8_0());
    case TensorType::Q4_0:
      return use(Q4_0());
    case TensorType::Q4_1:
      return use(Q4_1());
    case TensorType::Q5_0:
      return use(Q5_0());
    case TensorType::Q5_1:
      return use(Q5_1());
    case TensorType::Q2_K:
      return use(Q2_K());
    case TensorType::Q3_K:
      return use(Q3_K());
    case TensorType::Q4_K:
      return use(Q4_K());
    case TensorType::Q5_K:
      return use(Q5_K());
    case TensorType::Q6_K:
      return use(Q6_K());
    case TensorType::IQ4_NL:
      return use(Iq4Nl());
  }
  COMMON_CHECK(false, "tensor type " + std::to_string(static_cast<std::uint32_t>(type)) + " has no blocks");
}

}  // namespace common::blocks
