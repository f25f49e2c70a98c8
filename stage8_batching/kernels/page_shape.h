// What pages hold, and of which sizes. Plain C++: no CUDA toolkit is needed to read it.
#pragma once

#include <cstdint>

#include "common/cuda/host_device.h"

namespace stage8 {

// Of what pages hold. kFloat8 is e4m3, one byte for each element, and each row has a scale (float8.cuh).
enum class ScalarType { kFloat32, kBFloat16, kFloat8 };

constexpr int bytes_of(ScalarType type) {
  return type == ScalarType::kFloat32 ? 4 : type == ScalarType::kBFloat16 ? 2 : 1;
}

// Of queries, outputs and rows of K and V on their way to pages of this type.
constexpr ScalarType row_type(ScalarType of_pages) {
  return of_pages == ScalarType::kFloat8 ? ScalarType::kBFloat16 : of_pages;
}

// One layer's K, and its V: [num_blocks, num_kv_heads, block_size, head_dim]. One head's part of one block is a dense
// block_size x head_dim matrix, whose vectors of 16 bytes lie in an order of their own (see page_layout.h).
struct PageShape {
  std::int64_t num_blocks = 0;
  int num_kv_heads = 0;
  int block_size = 0;  // float32: any; bfloat16: 8, 16, 32 or 64; float8: 16, 32 or 64
  int head_dim = 0;    // float32: a multiple of 8, up to 256; else 32, 64, 96, 128 or 256
  ScalarType type = ScalarType::kBFloat16;

  // Float8: K and V of a tile lie together, with their scales, in the array of keys, and there is none of values.
  COURSE_HOST_DEVICE bool is_paired() const { return type == ScalarType::kFloat8; }
  COURSE_HOST_DEVICE int elements_per_row() const {
    const int scales = head_dim < 128 ? head_dim / 16 : 8;  // two, and what keeps tiles aligned (page_layout.h)
    return is_paired() ? 2 * head_dim + scales : head_dim;
  }
  std::int64_t elements_per_block() const { return std::int64_t{num_kv_heads} * block_size * elements_per_row(); }
  std::int64_t elements() const { return num_blocks * elements_per_block(); }
  // One layer's K and V of a block.
  std::int64_t bytes_per_block() const { return (is_paired() ? 1 : 2) * elements_per_block() * bytes_of(type); }
};

}  // namespace
