// Compares floats, for all tests. NaN and infinity never pass.
#pragma once

#include <span>
#include <string>

namespace tests {

// actual may differ from expected by absolute + relative * |expected|.
struct Tolerance {
  double absolute = 0.0;
  double relative = 0.0;
};

// Empty if all values are finite and within the tolerance. Otherwise one line: how many values are not, and an index
// with both values and the bound. It is the first value that is not finite, or else the value that exceeds its bound
// the most.
std::string compare(std::span<const float> actual, std::span<const double> expected, Tolerance tolerance);
std::string compare(std::span<const float> actual, std::span<const float> expected, Tolerance tolerance);

// Empty if both have the same bytes and no NaN. +0 and -0 have different bytes. Otherwise one line, as above.
std::string compare_bits(std::span<const float> actual, std::span<const float> expected);

}  // namespace tests
