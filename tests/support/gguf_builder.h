// Builds GGUF files in memory: whole ones from a few calls, and, through the public members and add_raw, malformed
// ones.
//
//   GgufBuilder builder;
//   builder.add("llama.block_count", std::uint32_t{2}).add("general.name", "tiny");
//   builder.add_array("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"});
//   builder.add_tensor("token_embd.weight", {2, 4}, std::vector<float>(8));
//   const Bytes bytes = builder.build();
//   const Gguf file = Gguf::parse(bytes, "tiny.gguf");  // `bytes` must live as long as `file`
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/model/gguf.h"

namespace tests {

using Bytes = std::vector<std::byte>;

// The numbers GGUF gives to the types of metadata values.
enum GgufValueType : std::uint32_t {
  kGgufUint8 = 0,
  kGgufInt8 = 1,
  kGgufUint16 = 2,
  kGgufInt16 = 3,
  kGgufUint32 = 4,
  kGgufInt32 = 5,
  kGgufFloat32 = 6,
  kGgufBool = 7,
  kGgufString = 8,
  kGgufArray = 9,
  kGgufUint64 = 10,
  kGgufInt64 = 11,
  kGgufFloat64 = 12,
};

// Appends `value` as it lies in memory.
template <typename T>
void append(Bytes& bytes, const T& value) {
  static_assert(std::is_arithmetic_v<T>);
  const std::size_t begin = bytes.size();
  bytes.resize(begin + sizeof(T));
  std::memcpy(bytes.data() + begin, &value, sizeof(T));
}

inline void append_text(Bytes& bytes, std::string_view text) {
  for (const char character : text) {
    bytes.push_back(static_cast<std::byte>(character));
  }
}

// As GGUF stores strings: the length in 64 bits, then the bytes.
inline void append_string(Bytes& bytes, std::string_view text) {
  append(bytes, std::uint64_t{text.size()});
  append_text(bytes, text);
}

template <typename T>
constexpr GgufValueType gguf_value_type() {
  if constexpr (std::is_same_v<T, bool>) {
    return kGgufBool;
  } else if constexpr (std::is_same_v<T, float>) {
    return kGgufFloat32;
  } else if constexpr (std::is_same_v<T, double>) {
    return kGgufFloat64;
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1) {
    return std::is_signed_v<T> ? kGgufInt8 : kGgufUint8;
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 2) {
    return std::is_signed_v<T> ? kGgufInt16 : kGgufUint16;
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 4) {
    return std::is_signed_v<T> ? kGgufInt32 : kGgufUint32;
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 8) {
    return std::is_signed_v<T> ? kGgufInt64 : kGgufUint64;
  } else {
    static_assert(std::is_convertible_v<T, std::string_view>);
    return kGgufString;
  }
}

template <typename T>
void append_value(Bytes& bytes, const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    append(bytes, value);
  } else {
    append_string(bytes, value);
  }
}

struct GgufTensor {
  std::string name;
  std::vector<std::uint64_t> dimensions;  // as in the file: the contiguous one first
  std::uint32_t type = 0;
  Bytes data;
  std::optional<std::uint64_t> offset;  // in place of the right one
};

class GgufBuilder {
 public:
  // Header fields that a malformed file may have wrong. A count that is not set is the number of entries.
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::optional<std::uint64_t> num_tensors;
  std::optional<std::uint64_t> num_pairs;
  std::vector<GgufTensor> tensors;

  // The value's C++ type picks its GGUF type. Adding a key twice writes it twice.
  template <typename T>
  GgufBuilder& add(const std::string& key, const T& value) {
    Bytes payload;
    append_value(payload, value);
    return add_raw(key, gguf_value_type<std::decay_t<T>>(), payload);
  }

  template <typename T>
  GgufBuilder& add_array(const std::string& key, const std::vector<T>& values) {
    Bytes payload;
    append(payload, static_cast<std::uint32_t>(gguf_value_type<T>()));
    append(payload, std::uint64_t{values.size()});
    for (const auto& value : values) {
      append_value(payload, static_cast<const T&>(value));  // a vector<bool> yields proxies
    }
    return add_raw(key, kGgufArray, payload);
  }

  // Takes any type number, and any bytes after it.
  GgufBuilder& add_raw(const std::string& key, std::uint32_t type, const Bytes& payload) {
    Bytes pair;
    append_string(pair, key);
    append(pair, type);
    pair.insert(pair.end(), payload.begin(), payload.end());
    pairs_.emplace_back(key, std::move(pair));
    return *this;
  }

  GgufBuilder& remove(std::string_view key) {
    std::erase_if(pairs_, [key](const auto& pair) { return pair.first == key; });
    return *this;
  }

  // Lays the tensors out with this alignment and says so in the metadata.
  GgufBuilder& set_alignment(std::uint32_t alignment) {
    alignment_ = alignment;
    return remove("general.alignment").add("general.alignment", alignment);
  }

  // shape: row-major, as in TensorInfo. `data` is what is stored, quantised as `type` says.
  GgufBuilder& add_tensor(const std::string& name, const std::vector<std::int64_t>& shape, common::TensorType type,
                          Bytes data) {
    GgufTensor tensor;
    tensor.name = name;
    tensor.type = static_cast<std::uint32_t>(type);
    tensor.data = std::move(data);
    for (const std::int64_t size : shape) {
      tensor.dimensions.insert(tensor.dimensions.begin(), static_cast<std::uint64_t>(size));
    }
    tensors.push_back(std::move(tensor));
    return *this;
  }

  // The same for F32.
  GgufBuilder& add_tensor(const std::string& name, const std::vector<std::int64_t>& shape,
                          const std::vector<float>& values) {
    Bytes data;
    for (const float value : values) {
      append(data, value);
    }
    return add_tensor(name, shape, common::TensorType::F32, std::move(data));
  }

  // No padding follows the last tensor, so the file ends with its last data byte.
  Bytes build() const {
    Bytes bytes;
    append_text(bytes, magic);
    append(bytes, version);
    append(bytes, num_tensors.value_or(tensors.size()));
    append(bytes, num_pairs.value_or(pairs_.size()));
    for (const auto& [key, pair] : pairs_) {
      bytes.insert(bytes.end(), pair.begin(), pair.end());
    }
    std::uint64_t next_offset = 0;
    for (const GgufTensor& tensor : tensors) {
      append_entry(bytes, tensor, tensor.offset.value_or(next_offset));
      next_offset = padded(next_offset + tensor.data.size());
    }
    for (const GgufTensor& tensor : tensors) {
      bytes.resize(padded(bytes.size()));
      bytes.insert(bytes.end(), tensor.data.begin(), tensor.data.end());
    }
    return bytes;
  }

 private:
  std::size_t padded(std::size_t size) const { return (size + alignment_ - 1) / alignment_ * alignment_; }

  static void append_entry(Bytes& bytes, const GgufTensor& tensor, std::uint64_t offset) {
    append_string(bytes, tensor.name);
    append(bytes, static_cast<std::uint32_t>(tensor.dimensions.size()));
    for (const std::uint64_t dimension : tensor.dimensions) {
      append(bytes, dimension);
    }
    append(bytes, tensor.type);
    append(bytes, offset);
  }

  std::vector<std::pair<std::string, Bytes>> pairs_;
  std::size_t alignment_ = 32;
};

// Filler for tensor data: every value is finite, as float16 or bfloat16, and so as a scale at any place of a block.
inline Bytes finite_data(std::size_t size) {
  Bytes data(size);
  for (std::size_t i = 0; i < size; ++i) {
    data[i] = static_cast<std::byte>((i * 37 + 11) % 120);  // float16's highest finite upper byte is 0x7B = 123
  }
  return data;
}

// Everything that the reader accepts, in 4 KiB: every type of metadata value, alone and in arrays, and a tensor of each
// type.
inline GgufBuilder small_gguf() {
  GgufBuilder builder;
  builder.add("general.architecture", "llama").set_alignment(64);
  builder.add("uint8", std::uint8_t{200}).add("int8", std::int8_t{-100});
  builder.add("uint16", std::uint16_t{60000}).add("int16", std::int16_t{-30000});
  builder.add("uint32", std::uint32_t{4000000000U}).add("int32", std::int32_t{-2000000000});
  builder.add("uint64", std::uint64_t{1} << 62U).add("int64", -(std::int64_t{1} << 62U));
  builder.add("float32", 0.25F).add("float64", 1e300).add("bool", true).add("string", "text");
  builder.add_array("uint8s", std::vector<std::uint8_t>{0, 255})
      .add_array("int8s", std::vector<std::int8_t>{-128, 127});
  builder.add_array("uint16s", std::vector<std::uint16_t>{65535})
      .add_array("int16s", std::vector<std::int16_t>{-32768});
  builder.add_array("uint32s", std::vector<std::uint32_t>{4294967295U});
  builder.add_array("int32s", std::vector<std::int32_t>{-1, 2, -3});
  builder.add_array("uint64s", std::vector<std::uint64_t>{5}).add_array("int64s", std::vector<std::int64_t>{-5});
  builder.add_array("float32s", std::vector<float>{1.5F, -2.5F}).add_array("float64s", std::vector<double>{0.1});
  builder.add_array("bools", std::vector<bool>{true, false});
  builder.add_array("strings", std::vector<std::string>{"", "one", "\xC4\xA0two"});
  builder.add_array("empty", std::vector<std::string>{});
  builder.add_tensor("f32", {2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6});
  builder.add_tensor("f16", {2, 2, 2}, common::TensorType::F16, finite_data(16));
  builder.add_tensor("bf16", {5}, common::TensorType::BF16, finite_data(10));
  builder.add_tensor("q8_0", {2, 32}, common::TensorType::Q8_0, finite_data(68));
  builder.add_tensor("q4_0", {1, 64}, common::TensorType::Q4_0, finite_data(36));
  builder.add_tensor("q4_1", {1, 1, 2, 32}, common::TensorType::Q4_1, finite_data(40));
  builder.add_tensor("q5_0", {1, 32}, common::TensorType::Q5_0, finite_data(22));
  builder.add_tensor("q5_1", {1, 32}, common::TensorType::Q5_1, finite_data(24));
  builder.add_tensor("q2_k", {1, 256}, common::TensorType::Q2_K, finite_data(84));
  builder.add_tensor("q3_k", {1, 256}, common::TensorType::Q3_K, finite_data(110));
  builder.add_tensor("q4_k", {1, 256}, common::TensorType::Q4_K, finite_data(144));
  builder.add_tensor("q5_k", {1, 256}, common::TensorType::Q5_K, finite_data(176));
  builder.add_tensor("q6_k", {1, 256}, common::TensorType::Q6_K, finite_data(210));
  builder.add_tensor("iq4_nl", {1, 32}, common::TensorType::IQ4_NL, finite_data(18));
  return builder;
}

}  // namespace tests
