// Converts stored tensor data to floats, block by block.
// Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <cstddef>
#include <span>

#include "common/model/tensor_type.h"

namespace common {

// Elements in one block of a type, and the bytes that block takes (F32: 1 and 4; Q8_0: 32 and 34; Q6_K: 256 and 210).
struct BlockFormat {
  int elements = 1;
  int bytes = 4;
};
BlockFormat block_format(TensorType type);
const char* type_name(TensorType type);

// Writes out.size() floats, a whole number of blocks; `data` must hold exactly those blocks. Throws CheckError if not.
void dequantize(TensorType type, std::span<const std::byte> data, std::span<float> out);

}  // namespace common
