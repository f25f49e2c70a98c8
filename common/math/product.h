// The arithmetic of attention and linear layers for few rows. A general matrix product first copies its operands into
// the order it likes; a decode step has one row, or one a query head of a group, and would spend more time on that copy
// than on the product. Results depend on the numbers alone, not on where they lie in memory.
#pragma once

#include <functional>

#include "common/base/tensor.h"

namespace common {

// c = a * b^T, for a: [m, k], b: [n, k], c: [m, n].
void multiply_transposed(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c);

// Rows first … first + count - 1 of a matrix that is not in memory as floats. The view holds until the next call.
using RowSource = std::function<MatrixView(Eigen::Index first, Eigen::Index count)>;

// The same product, bit for bit, for rows of b that are made as they are needed: so few at a time that they stay in the
// cache.
void multiply_transposed(const Eigen::Ref<const Matrix>& a, Eigen::Index num_b_rows, const RowSource& b,
                         Eigen::Ref<Matrix> c);

// c += a * b, for a: [m, k], b: [k, n], c: [m, n].
void multiply_add(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c);

// Replaces each score by exp(score - largest), and returns the sum of them. A score of -inf becomes 0.
float exponentials(Eigen::Ref<RowVector> scores, float largest);

}  // namespace common
