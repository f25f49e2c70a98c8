// The arithmetic of attention and linear layers for few rows. A general matrix product first copies its operands into
// the order it likes; a decode step has one row, or one a query head of a group, and would spend more time on that copy
// than on the product. Results depend on the numbers alone, not on where they lie in memory.
#pragma once

#include "common/base/tensor.h"

namespace common {

// c = a * b^T, for a: [m, k], b: [n, k], c: [m, n].
void multiply_transposed(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c);

// c += a * b, for a: [m, k], b: [k, n], c: [m, n].
void multiply_add(const Eigen::Ref<const Matrix>& a, const Eigen::Ref<const Matrix>& b, Eigen::Ref<Matrix> c);

// Replaces each score by exp(score - largest), and returns the sum of them. A score of -inf becomes 0.
float exponentials(Eigen::Ref<RowVector> scores, float largest);

}  // namespace common
