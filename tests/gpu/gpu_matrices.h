// What the GPU tests of the runner and of the engine share.
#pragma once

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "common/base/tensor.h"
#include "common/base/text.h"

namespace tests {

// Empty if all numbers are within `tolerance` of each other, and none is NaN.
inline std::string compare(const common::Matrix& actual, const common::Matrix& expected, float tolerance) {
  if (actual.rows() != expected.rows() || actual.cols() != expected.cols()) {
    return "another shape";
  }
  for (Eigen::Index i = 0; i < actual.size(); ++i) {
    if (!(std::abs(actual.data()[i] - expected.data()[i]) <= tolerance)) {
      return common::format("number %td: %g, expected %g", i, actual.data()[i], expected.data()[i]);
    }
  }
  return "";
}

inline std::vector<common::Token> some_tokens(int count, int salt) {
  std::vector<common::Token> tokens;
  tokens.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    tokens.push_back((31 * i + 97 * salt + 5) % 2048);
  }
  return tokens;
}

}  // namespace tests
