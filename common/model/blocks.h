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
#include "common/model/tensor_type.h"

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
    out = out * 0x1p112F;
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

// The number in a lane's lowest kBits bits, less kCentre; for one lane or for sixteen.
template <int kBits, int kCentre = 0>
struct LowBits {
  template <typename Lanes>
  void operator()(const Lanes& lanes, Lanes& q) const {
    q = (lanes & ((1 << kBits) - 1)) - kCentre;
  }
};

// 16 bytes, whose low nibbles are weights 0 … 15 of the block and whose high nibbles are weights 16 … 31. Only the
// lowest four bits of a lane count.
struct Nibbles {
  Integers low;
  Integers high;
  explicit Nibbles(const std::uint8_t* data) {
    load_uint8(data, low);
    high = low >> 4;
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
    scale_low_bits<4>(nibbles.low, LowBits<4, 8>(), scale, first);
    scale_low_bits<4>(nibbles.high, LowBits<4, 8>(), scale, second);
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
    const Nibbles nibbles(block + 4);
    Packet first;
    Packet second;
    scale_low_bits<4>(nibbles.low, LowBits<4>(), scale, minimum, first);
    scale_low_bits<4>(nibbles.high, LowBits<4>(), scale, minimum, second);
    use(0, first, second);
  }
};

// Nibbles with a fifth bit each: bit i of the 32 bits before them belongs to weight i. Only the lowest five bits of a
// lane count.
struct FiveBits {
  Integers low;
  Integers high;
  FiveBits(const std::uint8_t* fifth_bits, const std::uint8_t* data) {
    const Nibbles nibbles(data);
    std::uint32_t bits = 0;
    std::memcpy(&bits, fifth_bits, sizeof bits);
    // Moves each weight's fifth bit to bit 4 of its lane: bit i for lane i of `low`, bit 16 + i for lane i of `high`.
    shift_by_lane(bits << 4U, low);
    shift_by_lane(bits >> 12U, high);
    select_bits(0x10, low, nibbles.low, low);
    select_bits(0x10, high, nibbles.high, high);
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
    scale_low_bits<5>(q.low, LowBits<5, 16>(), scale, first);
    scale_low_bits<5>(q.high, LowBits<5, 16>(), scale, second);
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
    scale_low_bits<5>(q.low, LowBits<5>(), scale, minimum, first);
    scale_low_bits<5>(q.high, LowBits<5>(), scale, minimum, second);
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
    look_up(kValues, nibbles.low & 0xF, low);
    look_up(kValues, nibbles.high, high);
    Packet first;
    Packet second;
    scale_lanes(low, scale, first);
    scale_lanes(high, scale, second);
    use(0, first, second);
  }
};

// --- Blocks of 256, with small scales for groups of 16 or 32 in a scale for the block ("K quants") --------------

// A factor, or an offset, for each of 16 groups of weights. They are in memory, from where one instruction broadcasts a
// number to all lanes.
struct GroupScales {
  alignas(64) std::array<float, kNumLanes> of_group{};

  // scale * integers
  GroupScales(const Integers& integers, float scale) {
    Packet packet;
    scale_lanes(integers, scale, packet);
    store(packet, of_group.data());
#ifdef __GNUC__
    // Without this, g++ takes each number out of the register again, which costs an instruction.
    asm("" : "+m"(of_group));  // NOLINT(hicpp-no-assembler)
#endif
  }
  float operator[](std::size_t group) const { return of_group[group]; }
};

// Calls use(0), use(1), … with compile-time constants, so that a shift by one of them costs one instruction.
template <int kCount, typename Use>
void unrolled(const Use& use) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) { (use(std::integral_constant<int, kIndex>()), ...); }
  (std::make_integer_sequence<int, kCount>());
}

// Moves bits up by `by`, or down if that is negative.
inline void move_bits(const Integers& bits, int by, Integers& out) { out = by >= 0 ? bits << by : bits >> -by; }

// 16 groups of 16: a byte for each, whose low nibble is the group's scale and whose high nibble is its minimum; then 64
// bytes with two bits for each weight; then the block's scale and minimum:
// scale * group_scale * q - minimum * group_minimum. In a half's 32 bytes, bits 0 and 1 are weights 0 … 31, bits 2 and
// 3 weights 32 … 63, and so on.
struct Q2_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 84;

  // A nibble holds a weight of each of two pairs, in bits 0 and 1 and in bits 2 and 3. This saves two of four shifts.
  template <int kFirstBit>
  struct TwoBits {
    template <typename Lanes>
    void operator()(const Lanes& lanes, Lanes& q) const {
      q = (lanes >> kFirstBit) & 3;
    }
  };

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    Integers both;
    load_uint8(block, both);
    const GroupScales scales(both & 0xF, half_at(block + 80));
    const GroupScales offsets(both >> 4, -half_at(block + 82));
    unrolled<2>([&](auto half) {
      std::array<Nibbles, 2> bits = {Nibbles(block + 16 + 32 * half), Nibbles(block + 32 + 32 * half)};
      unrolled<4>([&](auto quarter) {
        constexpr int kPair = 4 * half + quarter;
        std::array<Packet, 2> weights;
        for (std::size_t i = 0; i < 2; ++i) {
          const std::size_t group = 2 * kPair + i;
          scale_low_bits<4>(quarter < 2 ? bits[i].low : bits[i].high, TwoBits<quarter % 2 * 2>(), scales[group],
                            offsets[group], weights[i]);
        }
        use(kPair, weights[0], weights[1]);
      });
    });
  }
};

// 32 bytes with the third bits (bit p of byte i belongs to weight 32 * p + i), 64 bytes with two bits for each weight
// as in Q2_K, 16 group scales of six bits in 12 bytes, scale: scale * (group_scale - 32) * (q - 4).
struct Q3_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 110;

  // Two of a lane's four bits are a weight's low bits, and one of the others is its third bit: bits 0, 1 and 2 for even
  // pairs, bits 2, 3 and 1 for odd ones. So four shifts bring the eight third bits to their places.
  template <bool kOdd>
  struct ThreeBits {
    template <typename Lanes>
    void operator()(const Lanes& lanes, Lanes& q) const {
      if constexpr (kOdd) {
        q = (((lanes >> 2) & 3) | ((lanes << 1) & 4)) - 4;
      } else {
        q = (lanes & 7) - 4;
      }
    }
  };

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    Integers group_scales;
    load_group_scales(block, group_scales);
    const GroupScales scales(group_scales - 32, half_at(block + 108));
    std::array<Integers, 2> third_bits;
    load_uint8(block, third_bits[0]);
    load_uint8(block + 16, third_bits[1]);
    unrolled<2>([&](auto half) {
      const std::array<Nibbles, 2> bits = {Nibbles(block + 32 + 32 * half), Nibbles(block + 48 + 32 * half)};
      unrolled<4>([&](auto quarter) {
        constexpr int kPair = 4 * half + quarter;
        constexpr bool kOdd = quarter % 2 == 1;
        constexpr int kThirdBit = kOdd ? 1 : 2;
        std::array<Packet, 2> weights;
        for (std::size_t i = 0; i < 2; ++i) {
          Integers lanes;
          move_bits(third_bits[i], kThirdBit - kPair, lanes);
          select_bits(1 << kThirdBit, lanes, quarter < 2 ? bits[i].low : bits[i].high, lanes);
          scale_low_bits<4>(lanes, ThreeBits<kOdd>(), scales[2 * kPair + i], weights[i]);
        }
        use(kPair, weights[0], weights[1]);
      });
    });
  }

 private:
  // The first eight bytes have the low four bits: of scales 0 … 7 in the low nibbles, of scales 8 … 15 in the high
  // nibbles. The last four bytes have the high two bits: byte i of the scales i, i + 4, i + 8 and i + 12.
  // Four scales at a time:
  static void load_group_scales(const std::uint8_t* block, Integers& scales) {
    std::array<std::uint32_t, 3> words{};
    std::memcpy(words.data(), block + 96, sizeof words);
    std::array<std::uint32_t, 4> six_bits{};
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t low = words[i % 2] >> (i / 2 * 4) & 0x0F0F0F0FU;
      six_bits[i] = low | (words[2] >> (2 * i) & 0x03030303U) << 4U;
    }
    spread_bytes(six_bits, scales);
  }
};

// 8 groups of 32, each with a scale and a minimum of six bits, in 12 bytes. The low six bits of bytes 0 … 3 are scales
// 0 … 3, of bytes 4 … 7 minimums 0 … 3. Bytes 8 … 11 have the low four bits of scales and minimums 4 … 7, whose high
// two bits are the high two bits of bytes 0 … 7. The scales go to lanes 0 … 7, the minimums to lanes 8 … 15.
inline void load_six_bit_scales(const std::uint8_t* data, Integers& out) {
  // Four bytes at a time.
  std::array<std::uint32_t, 3> words{};
  std::memcpy(words.data(), data, sizeof words);
  const std::array<std::uint32_t, 4> six_bits = {
      words[0] & 0x3F3F3F3FU, (words[2] & 0x0F0F0F0FU) | (words[0] >> 2U & 0x30303030U), words[1] & 0x3F3F3F3FU,
      (words[2] >> 4U & 0x0F0F0F0FU) | (words[1] >> 2U & 0x30303030U)};
  spread_bytes(six_bits, out);
}

// scale, minimum, group scales, 128 bytes of nibbles: scale * group_scale * q - minimum * group_minimum. In each 32
// bytes, the low nibbles are one group and the high nibbles the next.
struct Q4_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 144;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    Integers groups;
    load_six_bit_scales(block + 4, groups);
    const GroupScales scales(groups, half_at(block));
    const GroupScales offsets(groups, -half_at(block + 2));
    unrolled<4>([&](auto two) {
      const Nibbles front(block + 16 + 32 * two);
      const Nibbles back(block + 32 + 32 * two);
      const auto group = [&](std::size_t pair, const Integers& low, const Integers& high) {
        Packet first;
        Packet second;
        scale_low_bits<4>(low, LowBits<4>(), scales[pair], offsets[8 + pair], first);
        scale_low_bits<4>(high, LowBits<4>(), scales[pair], offsets[8 + pair], second);
        use(static_cast<int>(pair), first, second);
      };
      group(2 * two, front.low, back.low);
      group(2 * two + 1, front.high, back.high);
    });
  }
};

// The same with a fifth bit: in the 32 bytes before the nibbles, bit p belongs to group p.
struct Q5_K {
  static constexpr int kElements = 256;
  static constexpr int kBytes = 176;

  template <typename Use>
  static void unpack(const std::uint8_t* block, const Use& use) {
    Integers groups;
    load_six_bit_scales(block + 4, groups);
    const GroupScales scales(groups, half_at(block));
    const GroupScales offsets(groups, -half_at(block + 2));
    std::array<Integers, 2> fifth_bits;
    load_uint8(block + 16, fifth_bits[0]);
    load_uint8(block + 32, fifth_bits[1]);
    unrolled<4>([&](auto two) {
      const Nibbles front(block + 48 + 32 * two);
      const Nibbles back(block + 64 + 32 * two);
      const auto group = [&](auto pair, const Integers& low, const Integers& high) {
        const std::array<Integers, 2> nibbles = {low, high};
        std::array<Packet, 2> weights;
        for (std::size_t i = 0; i < 2; ++i) {
          Integers lanes;
          move_bits(fifth_bits[i], 4 - pair, lanes);
          select_bits(0x10, lanes, nibbles[i], lanes);
          scale_low_bits<5>(lanes, LowBits<5>(), scales[pair], offsets[8 + pair], weights[i]);
        }
        use(pair, weights[0], weights[1]);
      };
      group(std::integral_constant<int, 2 * two>(), front.low, back.low);
      group(std::integral_constant<int, 2 * two + 1>(), front.high, back.high);
    });
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
    Integers group_scales;
    load_int8(block + 192, group_scales);
    const GroupScales scales(group_scales, half_at(block + 208));
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
          scale_lanes(((low & 0xF) | (high & 0x30)) - 32, scales[2 * kPair + i], weights[i]);
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
