// What pages hold, and their sizes. Plain C++: including it needs no CUDA toolkit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/host_device.h"
#include "common/cuda/precision.h"

namespace common {

// The type of what pages hold. kFloat8 is e4m3, one byte an element, and a scale for each row (float8.cuh).
enum class ScalarType { kFloat32, kBFloat16, kFloat8 };

COURSE_HOST_DEVICE constexpr int bytes_of(ScalarType type) {
  return type == ScalarType::kFloat32 ? 4 : type == ScalarType::kBFloat16 ? 2 : 1;
}

// What pages hold for a user's choice.
constexpr ScalarType page_type(const GpuTypes& types) {
  return types.kv_cache == KvCacheType::kFloat8   ? ScalarType::kFloat8
         : types.precision == Precision::kFloat32 ? ScalarType::kFloat32
                                                  : ScalarType::kBFloat16;
}

// The type of queries, outputs, and rows of K and V before they are stored in pages of this type.
constexpr ScalarType row_type(ScalarType of_pages) {
  return of_pages == ScalarType::kFloat8 ? ScalarType::kBFloat16 : of_pages;
}

// One layer's K, and its V: [num_blocks, num_kv_heads, block_size, head_dim]. One head's part of one block is a dense
// block_size x head_dim matrix, whose vectors of 16 bytes lie in an order of their own (see page_layout.h).
struct PageShape {
  std::int64_t num_blocks = 0;
  int num_kv_heads = 0;
  int block_size = 0;
  int head_dim = 0;  // a multiple of 8, up to 256
  ScalarType type = ScalarType::kBFloat16;

  // Float8: the array of keys holds K, V and the scales of a tile together, and there is no array of values.
  COURSE_HOST_DEVICE bool is_paired() const { return type == ScalarType::kFloat8; }
  COURSE_HOST_DEVICE int elements_per_row() const {
    const int scales = head_dim < 128 ? head_dim / 16 : 8;  // a row's two, and padding to align tiles (page_layout.h)
    return is_paired() ? 2 * head_dim + scales : head_dim;
  }
  std::int64_t elements_per_block() const { return std::int64_t{num_kv_heads} * block_size * elements_per_row(); }
  std::int64_t elements() const { return num_blocks * elements_per_block(); }
  // One layer's arrays.
  std::size_t keys_bytes() const { return static_cast<std::size_t>(elements() * bytes_of(type)); }
  std::size_t values_bytes() const { return is_paired() ? 0 : keys_bytes(); }
  // One layer's K and V of a block.
  std::int64_t bytes_per_block() const { return (is_paired() ? 1 : 2) * elements_per_block() * bytes_of(type); }
};

}  // namespace common
