#include "common/model/dequantize.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "common/base/check.h"
#include "common/math/lanes.h"
#include "common/model/blocks.h"

namespace common {
namespace {

template <typename Format>
void unpack_block(const std::uint8_t* block, float* out) {
  Format::unpack(block, [out](int pair, const Packet& first, const Packet& second) {
    store(first, out + 32 * pair);
    store(second, out + 32 * pair + 16);
  });
}

}  // namespace

BlockFormat block_format(TensorType type) {
  if (type == TensorType::F32) {
    return {1, 4};
  }
  if (type == TensorType::F16 || type == TensorType::BF16) {
    return {1, 2};
  }
  BlockFormat format;
  blocks::with_format(type, [&](auto of_type) {
    using Format = decltype(of_type);
    format = {Format::kElements, Format::kBytes};
  });
  return format;
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
    case TensorType::Q5_0:
      return "Q5_0";
    case TensorType::Q5_1:
      return "Q5_1";
    case TensorType::Q2_K:
      return "Q2_K";
    case TensorType::Q3_K:
      return "Q3_K";
    case TensorType::Q4_K:
      return "Q4_K";
    case TensorType::Q5_K:
      return "Q5_K";
    case TensorType::Q6_K:
      return "Q6_K";
    case TensorType::IQ4_NL:
      return "IQ4_NL";
  }
  COMMON_CHECK(false, "tensor type " + std::to_string(static_cast<std::uint32_t>(type)) + " has no name");
}

void dequantize(TensorType type, std::span<const std::byte> data, std::span<float> out) {
  const BlockFormat block = block_format(type);
  const auto block_elements = static_cast<std::size_t>(block.elements);
  COMMON_CHECK(out.size() % block_elements == 0, "the output must be a whole number of blocks");
  COMMON_CHECK(data.size() == out.size() / block_elements * static_cast<std::size_t>(block.bytes),
               "the data must be exactly the output's blocks");
  if (out.empty()) {
    return;
  }
  if (type == TensorType::F32) {
    std::memcpy(out.data(), data.data(), data.size());
    return;
  }
  blocks::with_format(type, [&](auto of_type) {
    using Format = decltype(of_type);
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(data.data());
    const std::size_t num_blocks = out.size() / Format::kElements;
    for (std::size_t i = 0; i < num_blocks; ++i) {
      unpack_block<Format>(bytes + i * Format::kBytes, out.data() + i * Format::kElements);
    }
    // Rows of F16 and BF16 can have any length, so that a part of a block can be left.
    const std::size_t done = num_blocks * Format::kElements;
    if (done < out.size()) {
      std::array<std::uint8_t, Format::kBytes> last{};
      std::array<float, Format::kElements> unpacked{};
      std::memcpy(last.data(), bytes + num_blocks * Format::kBytes, data.size() - num_blocks * Format::kBytes);
      unpack_block<Format>(last.data(), unpacked.data());
      std::copy_n(unpacked.data(), out.size() - done, out.data() + done);
    }
  });
}

}  // namespace common
