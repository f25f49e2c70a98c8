#include "common/model/linear.h"

#include <string>

#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/product.h"

namespace common {

Matrix linear(const Matrix& x, const Eigen::Ref<const Matrix>& weights) {
  COMMON_CHECK(x.cols() == weights.cols(), "a linear layer got " + std::to_string(x.cols()) + " features, expected " +
                                               std::to_string(weights.cols()));
  Matrix y(x.rows(), weights.rows());
  parallel_for(static_cast<int>(weights.rows()), [&](int begin, int end) {
    multiply_transposed(x, weights.middleRows(begin, end - begin), y.middleCols(begin, end - begin));
  });
  return y;
}

}  // namespace common
