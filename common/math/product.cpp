#include "common/math/product.h"

#include <algorithm>
#include <array>

#include "common/base/check.h"
#include "common/math/lanes.h"

namespace common {
namespace {

// Above this many rows of a, packing pays.
constexpr Eigen::Index kFewRows = 8;
// For a * b^T, where b is far larger than a: above this many, packing b pays too.
constexpr Eigen::Index kSomeRows = 64;

constexpr Eigen::Index kPacket = kNumLanes;

// Made of a source, this many rows of b at a time: see panel_rows.
constexpr Eigen::Index kPanelFloats = Eigen::Index{1} << 17;  // half a megabyte
constexpr Eigen::Index kPanelStep = 48;

Packet load(const float* data) { return Eigen::Map<const Packet>(data); }

// A masked score, -inf, has a weight of exactly 0. Eigen's vectorised exp would make 3e-39 of it: it limits its
// argument.
Packet exp_or_zero(const Packet& x) {
  Packet result = x.exp();
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
    // Two sums a row, so that an addition need not wait for the one before it.
    std::array<Packet, kRows> even;
    std::array<Packet, kRows> odd;
    even.fill(Packet::Zero());
    odd.fill(Packet::Zero());
    for (Eigen::Index i = 0; i < pairs; i += 2 * kPacket) {
      for (std::size_t row = 0; row < kRows; ++row) {
        const float* const a_row = a.row(static_cast<Eigen::Index>(row));
        even[row] += load(a_row + i) * load(b_row + i);
        odd[row] += load(a_row + i + kPacket) * load(b_row + i + kPacket);
      }
    }
    for (std::size_t row = 0; row < kRows; ++row) {
      const float* const a_row = a.row(static_cast<Eigen::Index>(row));
      if (pairs < whole) {
        even[row] += load(a_row + pairs) * load(b_row + pairs);
      }
      float sum = (even[row] + odd[row]).sum();
      for (Eigen::Index i = whole; i < k; ++i) {
        sum += a_row[i] * b_row[i];
      }
      c[static_cast<Eigen::Index>(row) * c_stride + col] = sum;
    }
  }
}

// c: [num_rows, kCols] = a * b^T for up to 16 rows of a and kCols rows of b, which is read as it lies. a_columns: [k,
// 16], a's columns one after the other. A sum is one lane, from the first product to the last: it depends on nothing
// else.
template <int kCols>
void outer_products(const float* a_columns, Rows b, Eigen::Index k, Eigen::Index num_rows, float* c,
                    Eigen::Index c_stride) {
  std::array<Packet, kCols> sums;
  sums.fill(Packet::Zero());
  for (Eigen::Index i = 0; i < k; ++i) {
    const Packet column = load(a_columns + i * kPacket);
    for (std::size_t col = 0; col < kCols; ++col) {
      sums[col] += column * b.row(static_cast<Eigen::Index>(col))[i];
    }
  }
  for (std::size_t col = 0; col < kCols; ++col) {
    for (Eigen::Index row = 0; row < num_rows; ++row) {
      c[row * c_stride + static_cast<Eigen::Index>(col)] = sums[col](row);
    }
  }
}

// c: [m, n] = a * b^T for more rows of a than a few, and far fewer than b has. Only a is brought into another order.
// rows_of_b(first, count): Rows, of at most 8.
template <typename RowsOfB>
void multiply_some_rows(const Eigen::Ref<const Matrix>& a, const RowsOfB& rows_of_b, Eigen::Index n, float* c,
                        Eigen::Index c_stride) {
  constexpr Eigen::Index kCols = 8;  // rows of b at a time: they stay in the cache from one tile of a to the next
  const Eigen::Index k = a.cols();
  const Eigen::Index num_tiles = (a.rows() + kPacket - 1) / kPacket;
  Matrix columns = Matrix::Zero(num_tiles * k, kPacket);  // tile by tile: [k, 16], zero where a has no rows
  for (Eigen::Index row = 0; row < a.rows(); ++row) {
    columns.block(row / kPacket * k, row % kPacket, k, 1) = a.row(row).transpose();
  }
  for (Eigen::Index first = 0; first < n; first += kCols) {
    const Rows b = rows_of_b(first, std::min(kCols, n - first));
    for (Eigen::Index tile = 0; tile < num_tiles; ++tile) {
      const Eigen::Index num_rows = std::min(kPacket, a.rows() - tile * kPacket);
      const float* const tile_columns = columns.data() + tile * k * kPacket;
      float* const to = c + tile * kPacket * c_stride + first;
      if (first + kCols <= n) {
        outer_products<kCols>(tile_columns, b, k, num_rows, to, c_stride);
      } else {
        for (Eigen::Index col = 0; first + col < n; ++col) {
          outer_products<1>(tile_columns, {b.row(col), b.stride}, k, num_rows, to + col, c_stride);
        }
      }
    }
  }
}

// Rows of b at a time for a general product. Eigen computes the last few rows of its left operand, here b, by kernels
// that add in another order. With panels of a multiple of 48 rows, three of its packets, only the last rows of all are
// such: the result is that of one product.
Eigen::Index panel_rows(Eigen::Index k) {
  return std::max<Eigen::Index>(1, kPanelFloats / std::max<Eigen::Index>(1, k) / kPanelStep) * kPanelStep;
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
      sums[row][packet] = load(address(row, packet));
    }
  }
  for (Eigen::Index i = 0; i < k; ++i) {
    for (std::size_t packet = 0; packet < kPackets; ++packet) {
      const Packet x = load(b.row(i) + static_cast<Eigen::Index>(packet) * kPacket);
      for (std::size_t row = 0; row < kRows; ++row) {
        sums[row][packet] += a.row(static_cast<Eigen::Index>(row))[i] * x;
      }
    }
  }
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t packet = 0; packet < kPackets; ++packet) {
      Eigen::Map<Packet>(address(row, packet)) = sums[row][packet];
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

// Calls four(row) or one(row) so that all rows are done.
template <typename Four, typename One>
void by_rows(Eigen::Index num_rows, const Four& four, const One& one) {
  Eigen::Index row = 0;
  for (; row + 4 <= num_rows; row += 4) {
    four(row);
  }
  for (; row < num_rows; ++row) {
    one(row);
  }
}

}  // namespace

void multiply_transposed(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c) {
  COMMON_CHECK(a.cols() == b.cols() && c.rows() == a.rows() && c.cols() == b.rows(), "shapes don't fit");
  if (a.rows() > kSomeRows) {
    c.noalias() = a * b.transpose();
    return;
  }
  const Rows b_rows{b.data(), b.outerStride()};
  if (a.rows() > kFewRows) {
    const auto rows_of_b = [&](Eigen::Index first, Eigen::Index) { return Rows{b_rows.row(first), b_rows.stride}; };
    multiply_some_rows(a, rows_of_b, b.rows(), c.data(), c.outerStride());
    return;
  }
  const auto run = [&](auto kernel, Eigen::Index row) {
    kernel(Rows{a.data() + row * a.outerStride(), a.outerStride()}, b_rows, b.rows(), a.cols(),
           c.data() + row * c.outerStride(), c.outerStride());
  };
  by_rows(
      a.rows(), [&](Eigen::Index row) { run(dot_product_rows<4>, row); },
      [&](Eigen::Index row) { run(dot_product_rows<1>, row); });
}

void multiply_transposed(const Eigen::Ref<const Matrix>& a, Eigen::Index num_b_rows, const RowSource& b,
                         Eigen::Ref<Matrix> c) {
  COMMON_CHECK(c.rows() == a.rows() && c.cols() == num_b_rows, "shapes don't fit");
  if (a.rows() > kFewRows && a.rows() <= kSomeRows) {
    const auto rows_of_b = [&](Eigen::Index first, Eigen::Index count) {
      const MatrixView rows = b(first, count);
      return Rows{rows.data(), rows.outerStride()};
    };
    multiply_some_rows(a, rows_of_b, num_b_rows, c.data(), c.outerStride());
    return;
  }
  const Eigen::Index step = a.rows() > kSomeRows ? panel_rows(a.cols()) : 1;
  for (Eigen::Index first = 0; first < num_b_rows; first += step) {
    const Eigen::Index count = std::min(step, num_b_rows - first);
    multiply_transposed(a, b(first, count), c.middleCols(first, count));
  }
}

void multiply_add(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c) {
  COMMON_CHECK(a.cols() == b.rows() && c.rows() == a.rows() && c.cols() == b.cols(), "shapes don't fit");
  if (a.rows() > kFewRows) {
    c.noalias() += a * b;
    return;
  }
  // Few enough rows of b at a time that they stay in the first-level cache from one group of columns to the next.
  constexpr Eigen::Index kDepth = 32;
  for (Eigen::Index first = 0; first < b.rows(); first += kDepth) {
    const Eigen::Index depth = std::min(kDepth, b.rows() - first);
    const Rows b_rows{b.data() + first * b.outerStride(), b.outerStride()};
    const auto run = [&](auto kernel, Eigen::Index row) {
      kernel(Rows{a.data() + row * a.outerStride() + first, a.outerStride()}, b_rows, b.cols(), depth,
             c.data() + row * c.outerStride(), c.outerStride());
    };
    by_rows(
        a.rows(), [&](Eigen::Index row) { run(add_product_rows<4>, row); },
        [&](Eigen::Index row) { run(add_product_rows<1>, row); });
  }
}

float exponentials(Eigen::Ref<RowVector> scores, float largest) {
  const Eigen::Index whole = scores.size() / kPacket * kPacket;
  Packet total = Packet::Zero();
  for (Eigen::Index first = 0; first < whole; first += kPacket) {
    const Packet packet = exp_or_zero(load(scores.data() + first) - largest);
    Eigen::Map<Packet>(scores.data() + first) = packet;
    total += packet;
  }
  // What does not fill a packet is computed like the others: a scalar exp would round differently.
  if (const Eigen::Index rest = scores.size() - whole; rest > 0) {
    std::array<float, kPacket> last{};
    std::copy_n(scores.data() + whole, rest, last.data());
    Eigen::Map<Packet> packet(last.data());
    packet = exp_or_zero(packet - largest);
    std::fill(last.begin() + rest, last.end(), 0.0F);
    std::copy_n(last.data(), rest, scores.data() + whole);
    total += packet;
  }
  return total.sum();
}

}  // namespace common
