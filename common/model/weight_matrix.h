// A weight matrix as its file stores it. It is one tensor, or several on top of each other that are multiplied by the
// same input (Q, K and V), each with its own type. Nothing is copied: the file's bytes must outlive the matrix. No
// floats are kept either: a product unpacks the blocks as it reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/base/tensor.h"
#include "common/model/gguf.h"

namespace common {

class WeightMatrix {
 public:
  struct Part {
    TensorType type = TensorType::F32;
    std::span<const std::byte> data;
    Eigen::Index first_row = 0;
    Eigen::Index rows = 0;
    std::size_t row_bytes = 0;
  };

  // Adds rows of `cols` weights below the present ones. Throws CheckError if `data` is not exactly those rows.
  void append(TensorType type, std::span<const std::byte> data, Eigen::Index rows, Eigen::Index cols);
  void append(const MatrixView& floats);
  // Rows first … first + count - 1 of another matrix, which are not copied either.
  void append_rows(const WeightMatrix& source, Eigen::Index first, Eigen::Index count);

  Eigen::Index rows() const { return rows_; }
  Eigen::Index cols() const { return cols_; }
  std::span<const Part> parts() const { return parts_; }
  std::int64_t num_bytes() const;  // as stored

  // Writes rows first … first + count - 1 to `out` as floats: [count, cols].
  void read_rows(Eigen::Index first, Eigen::Index count, float* out) const;

 private:
  Eigen::Index rows_ = 0;
  Eigen::Index cols_ = 0;
  std::vector<Part> parts_;
};

// x: [num_tokens, in_features], weights: [out_features, in_features]. Returns x * weights^T: [num_tokens,
// out_features], bit for bit what linear() of the weights as floats returns. Throws CheckError if in_features differ.
Matrix linear(const Matrix& x, const WeightMatrix& weights);

}  // namespace common
