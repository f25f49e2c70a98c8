// The matrix product of a linear layer, split over the threads by output feature.
#pragma once

#include "common/base/tensor.h"

namespace common {

// x: [num_tokens, in_features]. weights: [out_features, in_features], as stored: a row for each output feature.
// Returns x * weights^T: [num_tokens, out_features]. Throws CheckError if in_features differ.
Matrix linear(const Matrix& x, const Eigen::Ref<const Matrix>& weights);

}  // namespace common
