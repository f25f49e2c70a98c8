// Random weights of every type that files have.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "common/base/check.h"
#include "common/math/sampling.h"
#include "common/model/dequantize.h"
#include "tests/support/gguf_builder.h"

namespace tests {

// Where a block's float16 scale is, and the scale of its minimums if it has minimums. With a minimum of `centre` times
// the scale, weights are as often negative as positive.
struct BlockScales {
  common::TensorType type;
  std::size_t scale;
  std::size_t minimum;
  float centre;
};

inline const std::vector<BlockScales>& block_scales() {
  using common::TensorType;
  static const std::vector<BlockScales> scales = {
      {TensorType::Q8_0, 0, 0, 0.0F},   {TensorType::Q4_0, 0, 0, 0.0F},   {TensorType::Q4_1, 0, 2, -7.5F},
      {TensorType::Q5_0, 0, 0, 0.0F},   {TensorType::Q5_1, 0, 2, -15.5F}, {TensorType::Q2_K, 80, 82, 1.5F},
      {TensorType::Q3_K, 108, 0, 0.0F}, {TensorType::Q4_K, 0, 2, 7.5F},   {TensorType::Q5_K, 0, 2, 15.5F},
      {TensorType::Q6_K, 208, 0, 0.0F}, {TensorType::IQ4_NL, 0, 0, 0.0F}};
  return scales;
}

// Every type: types with blocks, and the three whose weights stand alone.
inline std::vector<common::TensorType> all_types() {
  std::vector<common::TensorType> types = {common::TensorType::F32, common::TensorType::F16, common::TensorType::BF16};
  for (const BlockScales& scales : block_scales()) {
    types.push_back(scales.type);
  }
  return types;
}

// The float16 next to a float in the range of its normal numbers.
inline std::uint16_t half_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value * 0x1p-112F) + 0x1000U;  // rounds half up
  return static_cast<std::uint16_t>((bits >> 16U & 0x8000U) | (bits >> 13U & 0x7FFFU));
}

// `count` random weights, stored in a type, with about this standard deviation. `count` must be whole blocks.
inline Bytes random_weights(common::Random& random, common::TensorType type, std::size_t count, float deviation) {
  const common::BlockFormat format = common::block_format(type);
  const auto put = [](Bytes& data, std::size_t at, auto value) { std::memcpy(data.data() + at, &value, sizeof value); };
  if (format.elements == 1) {
    Bytes data;
    for (std::size_t i = 0; i < count; ++i) {
      const auto value = deviation * static_cast<float>(random.normal());
      if (type == common::TensorType::F32) {
        append(data, value);
      } else if (type == common::TensorType::F16) {
        append(data, half_of(value));
      } else {
        append(data, static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16U));
      }
    }
    return data;
  }
  const auto scales = std::find_if(block_scales().begin(), block_scales().end(),
                                   [type](const BlockScales& block) { return block.type == type; });
  COMMON_CHECK(scales != block_scales().end(), "the type is in the table");
  const auto block_bytes = static_cast<std::size_t>(format.bytes);
  Bytes data(count / static_cast<std::size_t>(format.elements) * block_bytes);
  std::generate(data.begin(), data.end(), [&] { return static_cast<std::byte>(random.below(256)); });
  const auto set_scales = [&](float scale) {
    for (std::size_t block = 0; block < data.size(); block += block_bytes) {
      if (scales->centre != 0.0F) {
        put(data, block + scales->minimum, half_of(scale * scales->centre));
      }
      put(data, block + scales->scale, half_of(scale));
    }
  };
  set_scales(1.0F);
  std::vector<float> weights(count);
  common::dequantize(type, data, weights);
  double squares = 0.0;
  for (const float weight : weights) {
    squares += static_cast<double>(weight) * static_cast<double>(weight);
  }
  set_scales(deviation / static_cast<float>(std::sqrt(squares / static_cast<double>(count))));
  return data;
}

}  // namespace tests
