// Where K and V lie in the pages. All kernels of this folder ask this function.
//
// Pages are [num_blocks, num_kv_heads, block_size, head_dim], as on the CPU: a row is one token's K or V of one head,
// and the rows of one head's part of a block lie one after the other.
#pragma once

#include <cstdint>

#include "common/paged/page_shape.h"

namespace stage7 {

// Where a row begins, in elements from the beginning of the layer's keys or values.
COURSE_HOST_DEVICE std::int64_t row_offset(const common::PageShape& shape, std::int64_t block, int kv_head, int row) {
  return ((block * shape.num_kv_heads + kv_head) * shape.block_size + row) * shape.head_dim;
}

}  // namespace
