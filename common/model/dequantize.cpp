#include "common/model/dequantize.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "common/base/check.h"

namespace common {
namespace {

// Multi-byte fields are copied as they lie in the file, and the file is little-endian.
static_assert(std::endian::native == std::endian::little, "GGUF data is read as little-endian");

// The blocks as they are stored. A scale is the bits of a float16; "weights" are quantised integers.

struct BlockQ8 {  // Q8_0: weight = scale * q, with q in -128 … 127
  std::uint16_t scale;
  std::array<std::int8_t, 32> weights;
};

// Two weights a byte: weights 0 … 15 are the low nibbles and 16 … 31 the high ones.
struct BlockQ4 {  // Q4_0: weight = scale * (q - 8), with q in 0 … 15
  std::uint16_t scale;
  std::array<std::uint8_t, 16> nibbles;
};

struct BlockQ4WithMinimum {  // Q4_1: weight = scale * q + minimum, with q in 0 … 15
  std::uint16_t scale;
  std::uint16_t minimum;
  std::array<std::uint8_t, 16> nibbles;
};

// 16 groups of 16 weights, each group with a scale of its own: weight = scale * group_scale * (q - 32), with q in
// 0 … 63. The low 4 bits of q lie in `low_bits` (2 weights a byte), the high 2 in `high_bits` (4 weights a byte).
struct BlockQ6K {
  std::array<std::uint8_t, 128> low_bits;
  std::array<std::uint8_t, 64> high_bits;
  std::array<std::int8_t, 16> group_scales;
  std::uint16_t scale;
};

static_assert(sizeof(BlockQ8) == 34 && sizeof(BlockQ4) == 18 && sizeof(BlockQ4WithMinimum) == 20 &&
                  sizeof(BlockQ6K) == 210,
              "a block has no padding");

// Exact: every float16 is a float. With exponent and mantissa shifted to where a float has them, the value is too small
// by a factor of 2^112 (112 = 127 - 15), for subnormal numbers as well. The one selection is between integers, so that
// compilers vectorise loops over this.
float float_from_half(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16U;
  const std::uint32_t magnitude = half & 0x7FFFU;
  const float finite = std::bit_cast<float>(magnitude << 13U) * 0x1p112F;
  const std::uint32_t infinite_or_nan = magnitude >= 0x7C00U ? 0x7F800000U : 0U;  // NaN keeps its payload
  return std::bit_cast<float>(sign | infinite_or_nan | std::bit_cast<std::uint32_t>(finite));
}

// The upper half of a float's bits.
float float_from_bfloat(std::uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bfloat) << 16U);
}

void decode(const BlockQ8& block, float* out) {
  const float scale = float_from_half(block.scale);
  for (std::size_t i = 0; i < block.weights.size(); ++i) {
    out[i] = scale * static_cast<float>(block.weights[i]);
  }
}

void decode(const BlockQ4& block, float* out) {
  const float scale = float_from_half(block.scale);
  for (std::size_t i = 0; i < block.nibbles.size(); ++i) {
    out[i] = scale * static_cast<float>((block.nibbles[i] & 0xF) - 8);
    out[i + 16] = scale * static_cast<float>((block.nibbles[i] >> 4) - 8);
  }
}

// scale * q has at most 11 + 4 significant bits, so it is exact and a fused multiply-add gives the same result.
void decode(const BlockQ4WithMinimum& block, float* out) {
  const float scale = float_from_half(block.scale);
  const float minimum = float_from_half(block.minimum);
  for (std::size_t i = 0; i < block.nibbles.size(); ++i) {
    out[i] = scale * static_cast<float>(block.nibbles[i] & 0xF) + minimum;
    out[i + 16] = scale * static_cast<float>(block.nibbles[i] >> 4) + minimum;
  }
}

// A half of the block is 128 weights in four quarters of 32. Quarters 0 and 2 share the half's first 32 bytes of low
// bits and quarters 1 and 3 the next 32; each of the half's 32 bytes of high bits serves all four quarters.
void decode(const BlockQ6K& block, float* out) {
  constexpr std::size_t kGroupSize = 16;
  const float scale = float_from_half(block.scale);
  for (std::size_t group = 0; group < block.group_scales.size(); ++group) {
    const std::size_t half = group / 8;
    const std::size_t quarter = group % 8 / 2;
    const std::size_t first = group % 2 * kGroupSize;  // of the group in its quarter
    const std::uint8_t* low = &block.low_bits[64 * half + 32 * (quarter % 2) + first];
    const std::uint8_t* high = &block.high_bits[32 * half + first];
    const auto low_shift = static_cast<int>(4 * (quarter / 2));
    const auto high_shift = static_cast<int>(2 * quarter);
    const float group_scale = scale * static_cast<float>(block.group_scales[group]);  // exact: 11 + 8 bits
    for (std::size_t i = 0; i < kGroupSize; ++i) {
      const int q = ((low[i] >> low_shift) & 0xF) | (((high[i] >> high_shift) & 0x3) << 4);
      out[group * kGroupSize + i] = group_scale * static_cast<float>(q - 32);
    }
  }
}

// Each block is copied first: it may not be aligned in memory, and the compiler vectorises only if it knows that
// writing the result cannot change the input.
template <typename Block>
void decode_blocks(std::span<const std::byte> data, std::span<float> out) {
  const std::size_t num_blocks = data.size() / sizeof(Block);
  const std::size_t block_elements = num_blocks == 0 ? 0 : out.size() / num_blocks;
  for (std::size_t i = 0; i < num_blocks; ++i) {
    Block block;
    std::memcpy(&block, data.data() + i * sizeof(Block), sizeof(Block));
    decode(block, out.data() + i * block_elements);
  }
}

template <typename Convert>
void convert_16_bit(std::span<const std::byte> data, std::span<float> out, Convert convert) {
  constexpr std::size_t kChunk = 64;
  std::array<std::uint16_t, kChunk> chunk{};
  for (std::size_t begin = 0; begin < out.size(); begin += kChunk) {
    const std::size_t count = out.size() - begin < kChunk ? out.size() - begin : kChunk;
    std::memcpy(chunk.data(), data.data() + begin * sizeof(std::uint16_t), count * sizeof(std::uint16_t));
    for (std::size_t i = 0; i < count; ++i) {
      out[begin + i] = convert(chunk[i]);
    }
  }
}

}  // namespace

BlockFormat block_format(TensorType type) {
  switch (type) {
    case TensorType::F32:
      return {1, 4};
    case TensorType::F16:
    case TensorType::BF16:
      return {1, 2};
    case TensorType::Q8_0:
      return {32, sizeof(BlockQ8)};
    case TensorType::Q4_0:
      return {32, sizeof(BlockQ4)};
    case TensorType::Q4_1:
      return {32, sizeof(BlockQ4WithMinimum)};
    case TensorType::Q6_K:
      return {256, sizeof(BlockQ6K)};
  }
  COMMON_CHECK(false, "tensor type " + std::to_string(static_cast<std::uint32_t>(type)) + " has no block format");
}

const char* type_name(TensorType type) {
  switch (type) {
    case TensorType::F32:
      return "F32";
    case TensorType::F16:
      return "F16";
    case TensorType::BF16:
      return "BF16";
    case TensorType::Q8_0:
      return "Q8_0";
    case TensorType::Q4_0:
      return "Q4_0";
    case TensorType::Q4_1:
      return "Q4_1";
    case TensorType::Q6_K:
      return "Q6_K";
  }
  COMMON_CHECK(false, "tensor type " + std::to_string(static_cast<std::uint32_t>(type)) + " has no name");
}

void dequantize(TensorType type, std::span<const std::byte> data, std::span<float> out) {
  const BlockFormat format = block_format(type);
  const auto block_elements = static_cast<std::size_t>(format.elements);
  COMMON_CHECK(out.size() % block_elements == 0, "the output must be a whole number of blocks");
  COMMON_CHECK(data.size() == out.size() / block_elements * static_cast<std::size_t>(format.bytes),
               "the data must be exactly the output's blocks");
  if (out.empty()) {
    return;
  }
  switch (type) {
    case TensorType::F32:
      std::memcpy(out.data(), data.data(), data.size());
      return;
    case TensorType::F16:
      convert_16_bit(data, out, float_from_half);
      return;
    case TensorType::BF16:
      convert_16_bit(data, out, float_from_bfloat);
      return;
    case TensorType::Q8_0:
      decode_blocks<BlockQ8>(data, out);
      return;
    case TensorType::Q4_0:
      decode_blocks<BlockQ4>(data, out);
      return;
    case TensorType::Q4_1:
      decode_blocks<BlockQ4WithMinimum>(data, out);
      return;
    case TensorType::Q6_K:
      decode_blocks<BlockQ6K>(data, out);
      return;
  }
}

}  // namespace common
