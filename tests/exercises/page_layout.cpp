// Where K and V lie in the pages, computed on the CPU: the kernels call the same functions.
#include "tests/support/catch.h"

#include <cstdint>

#include "stage7/kernels/page_layout.h"

using common::PageShape;
using stage7::row_offset;

TEST_CASE("page layout: rows of a head are dense in their block, heads in their block, blocks one after the other") {
  const PageShape shape{.num_blocks = 8, .num_kv_heads = 2, .block_size = 4, .head_dim = 32};
  CHECK(row_offset(shape, 0, 0, 0) == 0);
  CHECK(row_offset(shape, 0, 0, 1) == 32);
  CHECK(row_offset(shape, 0, 1, 0) == 128);
  CHECK(row_offset(shape, 1, 0, 0) == 256);
  CHECK(row_offset(shape, 3, 1, 1) == 928);  // position 9 of block table [7, 1, 3]
}

TEST_CASE("page layout: rows are counted in 64 bits") {
  const PageShape shape{.num_blocks = 1 << 20, .num_kv_heads = 8, .block_size = 16, .head_dim = 128};
  CHECK(row_offset(shape, (1 << 20) - 1, 7, 15) == (std::int64_t{1} << 34) - 128);
}
