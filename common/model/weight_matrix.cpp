#include "common/model/weight_matrix.h"

#include <algorithm>
#include <array>
#include <string>

#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/lanes.h"
#include "common/math/product.h"
#include "common/model/blocks.h"
#include "common/model/dequantize.h"

namespace common {
namespace {

// Up to this many tokens are multiplied by the blocks as these are unpacked; with more, it pays to unpack a row into
// the cache first. common/math/product.cpp has the same limit, and these products have to repeat its sums.
constexpr Eigen::Index kFewTokens = 8;

// How far ahead the weights are fetched. Rows follow each other in memory, so that this reaches the next ones too. A
// processor's own prefetching stops at the end of a page of 4 KiB, that is after a few microseconds.
constexpr std::size_t kPrefetchBytes = 4096;

template <int kBytes>
void prefetch([[maybe_unused]] const std::uint8_t* data) {
#ifdef __GNUC__
  for (int line = 0; line < kBytes; line += 64) {
    __builtin_prefetch(data + line);
  }
#endif
}

bool holds_floats(const WeightMatrix::Part& part) {
  // Nothing in a file need be aligned in memory.
  return part.type == TensorType::F32 && reinterpret_cast<std::uintptr_t>(part.data.data()) % alignof(float) == 0;
}

const std::byte* row_data(const WeightMatrix::Part& part, Eigen::Index row) {
  return part.data.data() + static_cast<std::size_t>(row - part.first_row) * part.row_bytes;
}

// y: [kTokens, rows] = x: [kTokens, features] by rows begin … end of a part. Each token has two sums, as in
// dot_product_rows() of common/math/product.cpp, and so the same results. All that it calls is inlined: g++ would leave
// some formats' unpacking as a call, and the sums in memory, which took up to four times as long.
template <typename Format, int kTokens>
[[gnu::flatten]] void multiply_blocks(const float* x, Eigen::Index x_stride, const WeightMatrix::Part& part,
                                      Eigen::Index begin, Eigen::Index end, Eigen::Index features, float* y,
                                      Eigen::Index y_stride) {
  for (Eigen::Index row = begin; row < end; ++row) {
    const auto* block = reinterpret_cast<const std::uint8_t*>(row_data(part, row));
    std::array<Packet, kTokens> even{};
    std::array<Packet, kTokens> odd{};
    for (Eigen::Index i = 0; i < features; i += Format::kElements, block += Format::kBytes) {
      prefetch<Format::kBytes>(block + kPrefetchBytes);
      Format::unpack(block, [&](int pair, const Packet& first, const Packet& second) {
        const float* const inputs = x + i + 32 * pair;
        for (std::size_t token = 0; token < kTokens; ++token) {
          const float* const input = inputs + static_cast<Eigen::Index>(token) * x_stride;
          Packet front;
          Packet back;
          load(input, front);
          load(input + kNumLanes, back);
          even[token] += front * first;
          odd[token] += back * second;
        }
      });
    }
    for (std::size_t token = 0; token < kTokens; ++token) {
      y[static_cast<Eigen::Index>(token) * y_stride + row] = sum_of(even[token] + odd[token]);
    }
  }
}

void multiply_few_tokens(const Matrix& x, const WeightMatrix::Part& part, Eigen::Index begin, Eigen::Index end,
                         Matrix& y) {
  blocks::with_format(part.type, [&](auto of_type) {
    using Format = decltype(of_type);
    by_rows(x.rows(), [&](auto count, Eigen::Index token) {
      multiply_blocks<Format, count>(x.data() + token * x.cols(), x.cols(), part, begin, end, x.cols(),
                                     y.data() + token * y.cols(), y.cols());
    });
  });
}

// Multiplies a few tokens by the part's rows from `begin` to `end`; rows outside of the part are left out.
void multiply_part(const Matrix& x, const WeightMatrix::Part& part, Eigen::Index begin, Eigen::Index end, Matrix& y) {
  begin = std::max(begin, part.first_row);
  end = std::min(end, part.first_row + part.rows);
  if (begin >= end) {
    return;
  }
  if (holds_floats(part)) {
    const auto* const floats = reinterpret_cast<const float*>(row_data(part, begin));
    multiply_transposed(x, MatrixView(floats, end - begin, x.cols()), y.middleCols(begin, end - begin));
  } else if (part.type != TensorType::F32 && x.cols() % 32 == 0) {
    multiply_few_tokens(x, part, begin, end, y);
  } else {
    RowVector floats(x.cols());
    for (Eigen::Index row = begin; row < end; ++row) {
      dequantize(part.type, {row_data(part, row), part.row_bytes}, {floats.data(), static_cast<std::size_t>(x.cols())});
      multiply_transposed(x, floats, y.middleCols(row, 1));
    }
  }
}

}  // namespace

void WeightMatrix::append(TensorType type, std::span<const std::byte> data, Eigen::Index rows, Eigen::Index cols) {
  COMMON_CHECK(rows > 0 && cols > 0 && (parts_.empty() || cols == cols_), "all rows must have as many weights");
  const BlockFormat format = block_format(type);
  COMMON_CHECK(cols % format.elements == 0, "a row must be whole blocks");
  const auto row_bytes = static_cast<std::size_t>(cols / format.elements * format.bytes);
  COMMON_CHECK(data.size() == static_cast<std::size_t>(rows) * row_bytes, "the data must be exactly the rows");
  parts_.push_back({type, data, rows_, rows, row_bytes});
  rows_ += rows;
  cols_ = cols;
}

void WeightMatrix::append(const MatrixView& floats) {
  append(TensorType::F32, std::as_bytes(std::span(floats.data(), static_cast<std::size_t>(floats.size()))),
         floats.rows(), floats.cols());
}

void WeightMatrix::append_rows(const WeightMatrix& source, Eigen::Index first, Eigen::Index count) {
  COMMON_CHECK(first >= 0 && count >= 0 && first + count <= source.rows(), "the rows must be the matrix's");
  for (const Part& part : source.parts_) {
    const Eigen::Index begin = std::max(first, part.first_row);
    const Eigen::Index end = std::min(first + count, part.first_row + part.rows);
    if (begin < end) {
      const auto bytes = static_cast<std::size_t>(end - begin) * part.row_bytes;
      append(part.type, {row_data(part, begin), bytes}, end - begin, source.cols());
    }
  }
}

std::int64_t WeightMatrix::num_bytes() const {
  std::int64_t bytes = 0;
  for (const Part& part : parts_) {
    bytes += static_cast<std::int64_t>(part.data.size());
  }
  return bytes;
}

void WeightMatrix::read_rows(Eigen::Index first, Eigen::Index count, float* out) const {
  COMMON_CHECK(first >= 0 && count >= 0 && first + count <= rows_, "the rows must be the matrix's");
  for (const Part& part : parts_) {
    const Eigen::Index begin = std::max(first, part.first_row);
    const Eigen::Index end = std::min(first + count, part.first_row + part.rows);
    if (begin < end) {
      const auto size = static_cast<std::size_t>(end - begin);
      dequantize(part.type, {row_data(part, begin), size * part.row_bytes},
                 {out + (begin - first) * cols_, size * static_cast<std::size_t>(cols_)});
    }
  }
}

Matrix linear(const Matrix& x, const WeightMatrix& weights) {
  COMMON_CHECK(x.cols() == weights.cols(), "a linear layer got " + std::to_string(x.cols()) + " features, expected " +
                                               std::to_string(weights.cols()));
  Matrix y(x.rows(), weights.rows());
  if (x.rows() <= kFewTokens) {
    parallel_for(static_cast<int>(weights.rows()), [&](int begin, int end) {
      for (const WeightMatrix::Part& part : weights.parts()) {
        multiply_part(x, part, begin, end, y);
      }
    });
    return y;
  }
  const PackedRows tokens(x);
  const WeightMatrix::Part& first_part = weights.parts().front();
  const bool are_floats = weights.parts().size() == 1 && holds_floats(first_part);
  parallel_for(static_cast<int>(weights.rows()), [&](int begin, int end) {
    Matrix unpacked;
    const RowSource rows = [&](Eigen::Index first, Eigen::Index count) {
      if (are_floats) {
        return MatrixView(reinterpret_cast<const float*>(row_data(first_part, begin + first)), count, x.cols());
      }
      if (unpacked.rows() < count) {
        unpacked.resize(count, x.cols());
      }
      weights.read_rows(begin + first, count, unpacked.data());
      return MatrixView(unpacked.data(), count, x.cols());
    };
    multiply_transposed(tokens, end - begin, rows, y.middleCols(begin, end - begin));
  });
  return y;
}

}  // namespace common
