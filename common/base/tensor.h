// The matrix types everything shares. Rows are tokens and columns are features, row-major: one token's features lie
// next to each other, which is also how the model's weights and the cache are stored.
#pragma once

#include <Eigen/Core>
#include <cstdint>

namespace common {

using Token = std::int32_t;

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowVector = Eigen::Matrix<float, 1, Eigen::Dynamic, Eigen::RowMajor>;

// Views of somebody else's floats: nothing is copied, and the owner must outlive them.
using MatrixView = Eigen::Map<const Matrix>;
using MutableMatrixView = Eigen::Map<Matrix>;

}  // namespace common
