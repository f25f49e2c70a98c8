// The arithmetic of attention and linear layers. A general matrix product first copies its operands into the order it
// prefers. A decode step has one row, or one row for each query head of a group, and would spend more time on that copy
// than on the product. Here, a prompt's rows are copied once, and the weights, which are unpacked for the product
// anyway, not at all. Results depend on the numbers alone, not on where they lie in memory.
#pragma once

#include <functional>

#include "common/base/tensor.h"

namespace common {

// c = a * b^T, for a: [m, k], b: [n, k], c: [m, n].
void multiply_transposed(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c);

// A left operand of many rows, in the order in which their product reads it: made once, for all threads that multiply
// it with their rows of a right operand.
class PackedRows {
 public:
  // rows: [m, k]. Copies them, on all threads.
  explicit PackedRows(const Eigen::Ref<const Matrix>& rows);

  Eigen::Index rows() const { return rows_; }
  Eigen::Index cols() const { return cols_; }
  Eigen::Index num_tiles() const { return tiles_.rows(); }
  const float* tile(Eigen::Index index) const { return tiles_.row(index).data(); }

 private:
  Eigen::Index rows_;
  Eigen::Index cols_;
  Matrix tiles_;  // each row is a tile: some of the operand's rows, column after column
};

// Rows first … first + count - 1 of a matrix, which need not be in memory as floats. The view holds until the next
// call.
using RowSource = std::function<MatrixView(Eigen::Index first, Eigen::Index count)>;

// c = a * b^T for rows of b that are made as they are needed: so few at a time that they stay in the cache. A row of c
// does not depend on a's other rows. It is, bit for bit, what the product above returns if a has more than eight rows.
void multiply_transposed(const PackedRows& a, Eigen::Index num_b_rows, const RowSource& b, Eigen::Ref<Matrix> c);

// c += a * b, for a: [m, k], b: [k, n], c: [m, n].
void multiply_add(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c);

// Replaces each score by exp(score - largest), and returns the sum of them. A score of -inf becomes 0.
float exponentials(Eigen::Ref<RowVector> scores, float largest);

}  // namespace common
