// The matrix types that all code shares. Rows are tokens, columns are features. Matrices are row-major, so one token's
// features are contiguous; the model's weights and the cache are stored the same way.
#pragma once

#include <Eigen/Core>
#include <cstdint>

namespace common {

using Token = std::int32_t;

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowVector = Eigen::Matrix<float, 1, Eigen::Dynamic, Eigen::RowMajor>;

// Views of floats that another object owns: nothing is copied, and the owner must outlive the view.
using MatrixView = Eigen::Map<const Matrix>;
using MutableMatrixView = Eigen::Map<Matrix>;

}  // namespace common
