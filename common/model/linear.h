// The matrix product of a linear layer, split over the threads by output features.
#pragma once

#include "common/base/tensor.h"

namespace common {

// x: [num_tokens, in_features], weights: [out_features, in_features] as stored, one output feature a row.
// Returns x * weights^T: [num_tokens, out_features].
Matrix linear(const Matrix& x, const Eigen::Ref<const Matrix>& weights);

}  // namespace common
