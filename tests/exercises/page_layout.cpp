// Where K and V lie in the pages, computed on the CPU: the kernels call the same functions.
#include "tests/support/catch.h"

#include <cstdint>
#include <set>

#include "stage7/kernels/page_layout.h"

using stage7::PageShape;
using stage7::row_offset;
using stage7::swizzle;
using stage7::swizzle_mask;

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

TEST_CASE("page layout: the swizzle puts the same vector of 8 rows into 8 columns, or as many as there can be") {
  for (const int vecs_per_row : {4, 8, 12, 16, 24, 32}) {
    for (int first_row = 0; first_row < 64; first_row += 8) {
      for (int vec = 0; vec < vecs_per_row; ++vec) {
        std::set<int> columns;
        for (int row = first_row; row < first_row + 8; ++row) {
          columns.insert((row * vecs_per_row + swizzle(vecs_per_row, row, vec)) % 8);
        }
        CHECK(columns.size() == 8);
      }
    }
  }
}

TEST_CASE("page layout: the swizzle keeps a vector inside its row, and each place has one") {
  for (const int vecs_per_row : {2, 3, 4, 6, 8, 12, 16, 32}) {
    for (int row = 0; row < 64; ++row) {
      std::set<int> taken;
      for (int vec = 0; vec < vecs_per_row; ++vec) {
        const int place = swizzle(vecs_per_row, row, vec);
        CHECK(place >= 0);
        CHECK(place < vecs_per_row);
        taken.insert(place);
      }
      CHECK(static_cast<int>(taken.size()) == vecs_per_row);
      CHECK(swizzle_mask(vecs_per_row, row) == swizzle_mask(vecs_per_row, row + 8));
    }
  }
}
