#include "common/math/product.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/lanes.h"

namespace common {
namespace {

// Above this many rows of a, packing pays.
constexpr Eigen::Index kFewRows = 8;

// If a product's three sizes add up to less, Eigen computes each of its elements by itself, as c is aligned: then the
// results would depend on where c lies in memory (EIGEN_GEMM_TO_COEFFBASED_PRODUCT_THRESHOLD).
constexpr Eigen::Index kSmallProduct = 20;

constexpr Eigen::Index kPacket = kNumLanes;

// The sums that a product of packed rows holds in registers: this many packets of rows of a, for this many rows of b.
// AVX-512 has 32 registers of one packet each. Where a packet takes two of 16 registers, or four of 32, six packets are
// the most that fit.
#ifdef __AVX512F__
constexpr Eigen::Index kTilePackets = 2;
constexpr Eigen::Index kTileCols = 12;
#else
constexpr Eigen::Index kTilePackets = 1;
constexpr Eigen::Index kTileCols = 6;
#endif

// Rows of b at a time, if a has several tiles: they stay in the second-level cache from one to the next.
constexpr Eigen::Index kPanelFloats = Eigen::Index{1} << 16;

// A tile's columns lie in the second-level cache too. They are fetched this many floats ahead.
constexpr Eigen::Index kPrefetchFloats = 256;

// A masked score, -inf, has a weight of exactly 0. Eigen's vectorised exp limits its argument, and would return 3e-39.
using Scores = Eigen::Array<float, kPacket, 1>;
Scores exp_or_zero(const Scores& x) {
  Scores result = x.exp();
  for (Eigen::Index i = 0; i < kPacket; ++i) {  // Eigen's select is not vectorised; the compiler does this loop
    result(i) = x(i) < -87.0F ? 0.0F : result(i);
  }
  return result;
}

// A row-major matrix by its first element and the distance between rows.
struct Rows {
  const float* data;
  Eigen::Index stride;
  const float* row(Eigen::Index index) const { return data + index * stride; }
};

// c: [kRows, n] = a * b^T for a: [kRows, k], b: [n, k]. One row of b after the other, from end to end: memory is read
// in order, which the processor's prefetching rewards (reading four rows side by side took twice the time).
template <int kRows>
void dot_product_rows(Rows a, Rows b, Eigen::Index n, Eigen::Index k, float* c, Eigen::Index c_stride) {
  const Eigen::Index pairs = k / (2 * kPacket) * (2 * kPacket);
  const Eigen::Index whole = k / kPacket * kPacket;
  for (Eigen::Index col = 0; col < n; ++col) {
    const float* const b_row = b.row(col);
    // Two sums for each row, so that an addition need not wait for the one before it.
    std::array<Packet, kRows> even{};
    std::array<Packet, kRows> odd{};
    const auto add = [&](std::array<Packet, kRows>& sums, Eigen::Index i) {
      Packet y;
      load(b_row + i, y);
      for (std::size_t row = 0; row < kRows; ++row) {
        Packet x;
        load(a.row(static_cast<Eigen::Index>(row)) + i, x);
        sums[row] += x * y;
      }
    };
    for (Eigen::Index i = 0; i < pairs; i += 2 * kPacket) {
      add(even, i);
      add(odd, i + kPacket);
    }
    if (pairs < whole) {
      add(even, pairs);
    }
    for (std::size_t row = 0; row < kRows; ++row) {
      const float* const a_row = a.row(static_cast<Eigen::Index>(row));
      float sum = sum_of(even[row] + odd[row]);
      for (Eigen::Index i = whole; i < k; ++i) {
        sum += a_row[i] * b_row[i];
      }
      c[static_cast<Eigen::Index>(row) * c_stride + col] = sum;
    }
  }
}

// How many rows a tile has room for: the last tile has one packet of them if that is enough.
Eigen::Index tile_rows(const PackedRows& a, Eigen::Index index) {
  return a.rows() - index * kTilePackets * kPacket <= kPacket ? kPacket : kTilePackets * kPacket;
}

void prefetch([[maybe_unused]] const float* data) {
#ifdef __GNUC__
  __builtin_prefetch(data);
#endif
}

// Where the product of packed rows and others goes: [packed rows, other rows], or transposed.
struct Destination {
  float* data;
  Eigen::Index stride;
  bool transposed;
  float* at(Eigen::Index packed_row, Eigen::Index other_row) const {
    return transposed ? data + other_row * stride + packed_row : data + packed_row * stride + other_row;
  }
};

// The product of a tile, [k, kPackets * 16], with kCols rows of b, which is read in place. num_rows of the tile's rows
// are real, the others padding. Each sum stays in one lane from the first product to the last, and depends on nothing
// else.
template <int kPackets, int kCols>
void multiply_tile(const float* tile, Rows b, Eigen::Index k, Eigen::Index num_rows, const Destination& c) {
  std::array<std::array<Packet, kPackets>, kCols> sums{};
  for (Eigen::Index i = 0; i < k; ++i) {
    std::array<Packet, kPackets> column;
    for (std::size_t packet = 0; packet < kPackets; ++packet) {
      load(tile, column[packet]);
      prefetch(tile + kPrefetchFloats);
      tile += kPacket;
    }
    for (std::size_t col = 0; col < kCols; ++col) {
      const float weight = b.row(static_cast<Eigen::Index>(col))[i];
      for (std::size_t packet = 0; packet < kPackets; ++packet) {
        sums[col][packet] += column[packet] * weight;
      }
    }
  }
  std::array<std::array<float, kPackets * kPacket>, kCols> columns_of_c;
  std::memcpy(columns_of_c.data(), sums.data(), sizeof columns_of_c);
  if (c.transposed) {
    for (std::size_t col = 0; col < kCols; ++col) {
      std::copy_n(columns_of_c[col].data(), num_rows, c.at(0, static_cast<Eigen::Index>(col)));
    }
    return;
  }
  for (Eigen::Index row = 0; row < num_rows; ++row) {
    for (std::size_t col = 0; col < kCols; ++col) {
      *c.at(row, static_cast<Eigen::Index>(col)) = columns_of_c[col][static_cast<std::size_t>(row)];
    }
  }
}

template <int kPackets>
void multiply_tile_by_panel(const float* tile, Rows b, Eigen::Index num_cols, Eigen::Index k, Eigen::Index num_rows,
                            const Destination& c) {
  Eigen::Index col = 0;
  const auto run = [&](auto cols) {
    for (; col + cols <= num_cols; col += cols) {
      multiply_tile<kPackets, cols>(tile, {b.row(col), b.stride}, k, num_rows, {c.at(0, col), c.stride, c.transposed});
    }
  };
  run(std::integral_constant<int, kTileCols>());
  run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 1>());
}

// rows_of_b(first, count) returns that many rows of b.
template <typename RowsOfB>
void multiply_packed(const PackedRows& a, Eigen::Index num_b_rows, const RowsOfB& rows_of_b, const Destination& c) {
  const Eigen::Index k = a.cols();
  const Eigen::Index panels = a.num_tiles() == 1 ? 1 : kPanelFloats / std::max<Eigen::Index>(1, k) / kTileCols;
  const Eigen::Index step = std::max<Eigen::Index>(1, panels) * kTileCols;
  for (Eigen::Index first = 0; first < num_b_rows; first += step) {
    const Eigen::Index count = std::min(step, num_b_rows - first);
    const Rows rows = rows_of_b(first, count);
    for (Eigen::Index index = 0; index < a.num_tiles(); ++index) {
      const Eigen::Index first_row = index * kTilePackets * kPacket;
      const Eigen::Index num_rows = std::min(tile_rows(a, index), a.rows() - first_row);
      const Destination to{c.at(first_row, first), c.stride, c.transposed};
      const auto run = [&](auto kernel) { kernel(a.tile(index), rows, count, k, num_rows, to); };
      if (tile_rows(a, index) == kPacket) {
        run(multiply_tile_by_panel<1>);
      } else {
        run(multiply_tile_by_panel<kTilePackets>);
      }
    }
  }
}

// c: [kRows, kPackets * 16] += a: [kRows, k] * b: [k, kPackets * 16], held in registers meanwhile.
template <int kRows, int kPackets>
void add_products(Rows a, Rows b, Eigen::Index k, float* c, Eigen::Index c_stride) {
  std::array<std::array<Packet, kPackets>, kRows> sums;
  const auto address = [&](std::size_t row, std::size_t packet) {
    return c + static_cast<Eigen::Index>(row) * c_stride + static_cast<Eigen::Index>(packet) * kPacket;
  };
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t packet = 0; packet < kPackets; ++packet) {
      load(address(row, packet), sums[row][packet]);
    }
  }
  for (Eigen::Index i = 0; i < k; ++i) {
    for (std::size_t packet = 0; packet < kPackets; ++packet) {
      Packet x;
      load(b.row(i) + static_cast<Eigen::Index>(packet) * kPacket, x);
      for (std::size_t row = 0; row < kRows; ++row) {
        sums[row][packet] += x * a.row(static_cast<Eigen::Index>(row))[i];
      }
    }
  }
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t packet = 0; packet < kPackets; ++packet) {
      store(sums[row][packet], address(row, packet));
    }
  }
}

template <int kRows>
void add_product_rows(Rows a, Rows b, Eigen::Index n, Eigen::Index k, float* c, Eigen::Index c_stride) {
  constexpr int kPackets = 8 / kRows;
  Eigen::Index col = 0;
  for (; col + kPackets * kPacket <= n; col += kPackets * kPacket) {
    add_products<kRows, kPackets>(a, {b.data + col, b.stride}, k, c + col, c_stride);
  }
  for (; col + kPacket <= n; col += kPacket) {
    add_products<kRows, 1>(a, {b.data + col, b.stride}, k, c + col, c_stride);
  }
  for (; col < n; ++col) {
    for (Eigen::Index row = 0; row < kRows; ++row) {
      for (Eigen::Index i = 0; i < k; ++i) {
        c[row * c_stride + col] += a.row(row)[i] * b.row(i)[col];
      }
    }
  }
}

}  // namespace

PackedRows::PackedRows(const Eigen::Ref<const Matrix>& rows) : rows_(rows.rows()), cols_(rows.cols()) {
  constexpr Eigen::Index kTileRows = kTilePackets * kPacket;
  constexpr Eigen::Index kDepth = 16;  // columns at a time: a cache line of each row
  tiles_.resize((rows_ + kTileRows - 1) / kTileRows, cols_ * kTileRows);
  parallel_for(static_cast<int>(num_tiles()), [&](int begin, int end) {
    for (Eigen::Index index = begin; index < end; ++index) {
      const Eigen::Index width = tile_rows(*this, index);
      const Eigen::Index first_row = index * kTileRows;
      const Eigen::Index num_rows = std::min(width, rows_ - first_row);
      float* const tile = tiles_.row(index).data();
      if (num_rows < width) {
        std::fill_n(tile, cols_ * width, 0.0F);
      }
      for (Eigen::Index first = 0; first < cols_; first += kDepth) {
        const Eigen::Index last = std::min(first + kDepth, cols_);
        for (Eigen::Index row = 0; row < num_rows; ++row) {
          const float* const source = rows.row(first_row + row).data();
          for (Eigen::Index col = first; col < last; ++col) {
            tile[col * width + row] = source[col];
          }
        }
      }
    }
  });
}

void multiply_transposed(const PackedRows& a, Eigen::Index num_b_rows, const RowSource& b, Eigen::Ref<Matrix> c) {
  COMMON_CHECK(c.rows() == a.rows() && c.cols() == num_b_rows, "shapes don't fit");
  const auto rows_of_b = [&](Eigen::Index first, Eigen::Index count) {
    const MatrixView rows = b(first, count);
    return Rows{rows.data(), rows.outerStride()};
  };
  multiply_packed(a, num_b_rows, rows_of_b, {c.data(), c.outerStride(), false});
}

void multiply_transposed(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c) {
  COMMON_CHECK(a.cols() == b.cols() && c.rows() == a.rows() && c.cols() == b.rows(), "shapes don't fit");
  const Rows b_rows{b.data(), b.outerStride()};
  if (a.rows() > kFewRows) {
    // The smaller operand is packed: in attention, a block's keys rather than a prompt's queries.
    const bool packs_b = b.rows() < a.rows();
    const Rows others = packs_b ? Rows{a.data(), a.outerStride()} : b_rows;
    multiply_packed(PackedRows(packs_b ? b : a), packs_b ? a.rows() : b.rows(),
                    [&](Eigen::Index first, Eigen::Index) {
                      return Rows{others.row(first), others.stride};
                    },
                    {c.data(), c.outerStride(), packs_b});
    return;
  }
  by_rows(a.rows(), [&](auto count, Eigen::Index row) {
    dot_product_rows<count>({a.data() + row * a.outerStride(), a.outerStride()}, b_rows, b.rows(), a.cols(),
                            c.data() + row * c.outerStride(), c.outerStride());
  });
}

void multiply_add(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c) {
  COMMON_CHECK(a.cols() == b.rows() && c.rows() == a.rows() && c.cols() == b.cols(), "shapes don't fit");
  if (a.rows() > kFewRows && a.rows() + a.cols() + b.cols() >= kSmallProduct) {
    c.noalias() += a * b;
    return;
  }
  // Few enough rows of b at a time that they stay in the first-level cache from one group of columns to the next.
  constexpr Eigen::Index kDepth = 32;
  for (Eigen::Index first = 0; first < b.rows(); first += kDepth) {
    const Eigen::Index depth = std::min(kDepth, b.rows() - first);
    const Rows b_rows{b.data() + first * b.outerStride(), b.outerStride()};
    by_rows(a.rows(), [&](auto count, Eigen::Index row) {
      add_product_rows<count>({a.data() + row * a.outerStride() + first, a.outerStride()}, b_rows, b.cols(), depth,
                              c.data() + row * c.outerStride(), c.outerStride());
    });
  }
}

float exponentials(Eigen::Ref<RowVector> scores, float largest) {
  const Eigen::Index whole = scores.size() / kPacket * kPacket;
  Scores total = Scores::Zero();
  for (Eigen::Index first = 0; first < whole; first += kPacket) {
    Eigen::Map<Scores> packet(scores.data() + first);
    packet = exp_or_zero(packet - largest);
    total += packet;
  }
  // The rest, less than a packet, is computed by the same instructions: a scalar exp would round differently.
  if (const Eigen::Index rest = scores.size() - whole; rest > 0) {
    std::array<float, kPacket> last{};
    std::copy_n(scores.data() + whole, rest, last.data());
    Eigen::Map<Scores> packet(last.data());
    packet = exp_or_zero(packet - largest);
    std::fill(last.begin() + rest, last.end(), 0.0F);
    std::copy_n(last.data(), rest, scores.data() + whole);
    total += packet;
  }
  return total.sum();
}

}  // namespace common
