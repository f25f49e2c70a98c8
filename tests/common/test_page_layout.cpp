// Where K and V lie in the pages of common/paged/, computed on the CPU: the kernels call the same functions.
#include "common/paged/page_layout.h"

#include <cstdint>
#include <set>

#include "tests/support/catch.h"

using common::PageShape;
using common::row_offset;
using common::swizzle;
using common::swizzle_mask;

TEST_CASE("page layout: rows of float8 are K and V together, with their scales") {
  const PageShape shape{
      .num_blocks = 8, .num_kv_heads = 2, .block_size = 32, .head_dim = 64, .type = common::ScalarType::kFloat8};
  CHECK(shape.elements_per_row() == 132);
  CHECK(row_offset(shape, 0, 0, 16) == 16 * 132);
  CHECK(row_offset(shape, 0, 1, 0) == 32 * 132);
  CHECK(row_offset(shape, 3, 1, 16) == (3 * 64 + 32 + 16) * 132);
  // Tiles begin where a line of memory does.
  for (const int head_dim : {32, 64, 96, 128, 256}) {
    PageShape other = shape;
    other.head_dim = head_dim;
    CHECK(row_offset(other, 0, 0, 16) % (head_dim >= 128 ? 128 : 32) == 0);
    CHECK(other.elements_per_row() >= 2 * (head_dim + 1));
  }
}

TEST_CASE("page layout: a block takes half the bytes in bfloat16, and a quarter and the scales in float8") {
  PageShape shape{
      .num_blocks = 8, .num_kv_heads = 3, .block_size = 16, .head_dim = 64, .type = common::ScalarType::kFloat32};
  CHECK(30 * shape.bytes_per_block() == 16 * 45 * 1024);  // SmolLM2-135M's 30 layers
  shape.type = common::ScalarType::kBFloat16;
  CHECK(2 * 30 * shape.bytes_per_block() == 16 * 45 * 1024);
  shape.type = common::ScalarType::kFloat8;
  CHECK(shape.bytes_per_block() == 16 * 3 * (2 * 64 + 4));
}

TEST_CASE("page layout: the swizzle puts the same vector of 8 rows into 8 columns, or as many as there can be") {
  for (const int vecs_per_row : {2, 4, 6, 8, 12, 16, 24, 32}) {
    for (int first_row = 0; first_row < 64; first_row += 8) {
      for (int vec = 0; vec < vecs_per_row; ++vec) {
        std::set<int> columns;
        for (int row = first_row; row < first_row + 8; ++row) {
          columns.insert((row * vecs_per_row + swizzle(vecs_per_row, row, vec)) % 8);
        }
        CAPTURE(vecs_per_row, first_row, vec);
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
        CAPTURE(vecs_per_row, row, vec);
        CHECK(place >= 0);
        CHECK(place < vecs_per_row);
        taken.insert(place);
      }
      CHECK(static_cast<int>(taken.size()) == vecs_per_row);
      CHECK(swizzle_mask(vecs_per_row, row) == swizzle_mask(vecs_per_row, row + 8));
    }
  }
}

namespace {

// Every vector of 64 rows has a place of its own, and the steps that attention makes through a tile lead there.
template <int kHeadDim, common::ScalarType kType = common::ScalarType::kBFloat16>
void check_places() {
  using Tile = common::SharedTile<kHeadDim, kType>;
  const int vecs = Tile::kVecs;
  std::set<int> taken;
  for (int row = 0; row < 64; ++row) {
    for (int vec = 0; vec < vecs; ++vec) {
      const int place = common::vec_place(vecs, common::kTileRows, row, vec);
      CHECK(place / (vecs * common::kTileRows) == row / common::kTileRows);
      taken.insert(place);
      if (row < common::kTileRows) {
        const auto step =
            static_cast<std::uint32_t>(Tile::row_begin(row)) + Tile::at_step(Tile::place(row, vec % 2), vec / 2);
        CHECK(static_cast<std::uint32_t>(place * common::kVecBytes) == step);
      }
    }
  }
  CHECK(static_cast<int>(taken.size()) == 64 * vecs);
  CHECK(*taken.begin() == 0);
  CHECK(*taken.rbegin() == 64 * vecs - 1);
}

}  // namespace

TEST_CASE("page layout: each vector has a place in its tile, and steps through the tile lead to it") {
  check_places<32>();
  check_places<64>();
  check_places<96>();
  check_places<128>();
  check_places<256>();
  check_places<32, common::ScalarType::kFloat8>();
  check_places<64, common::ScalarType::kFloat8>();
  check_places<96, common::ScalarType::kFloat8>();
  check_places<128, common::ScalarType::kFloat8>();
  check_places<256, common::ScalarType::kFloat8>();
}

TEST_CASE("page layout: the swizzle leaves every vector a place of its own, in blocks of any size") {
  for (const common::ScalarType type : {common::ScalarType::kFloat32, common::ScalarType::kBFloat16}) {
    for (const int block_size : {1, 3, 8, 12, 16, 24, 64, 100}) {
      for (const int head_dim : {8, 24, 64, 80, 128, 256}) {
        CAPTURE(common::bytes_of(type), block_size, head_dim);
        const PageShape shape{
            .num_blocks = 2, .num_kv_heads = 2, .block_size = block_size, .head_dim = head_dim, .type = type};
        const int vecs = head_dim * common::bytes_of(type) / common::kVecBytes;
        std::set<std::int64_t> taken;
        for (int row = 0; row < block_size; ++row) {
          for (int vec = 0; vec < vecs; ++vec) {
            taken.insert(common::page_vecs(shape).place(1, 1, row, vec));
          }
        }
        CHECK(static_cast<int>(taken.size()) == block_size * vecs);
        CHECK(*taken.begin() == 3 * block_size * vecs);
        CHECK(*taken.rbegin() == 4 * block_size * vecs - 1);
      }
    }
  }
}

TEST_CASE("page layout: panels of rows of 256 and 512 bytes have 128, rows of other lengths are one panel") {
  CHECK(common::vecs_per_panel(16) == 8);
  CHECK(common::vecs_per_panel(32) == 8);
  for (const int vecs_per_row : {4, 8, 12, 24, 64}) {
    CHECK(common::vecs_per_panel(vecs_per_row) == vecs_per_row);
  }
}
