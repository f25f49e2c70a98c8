// Compares floats, for every test that computes some. NaN and infinity never pass.
#pragma once

#include <span>
#include <string>

namespace tests {

// actual may differ from expected by absolute + relative * |expected|.
struct Tolerance {
  double absolute = 0.0;
  double relative = 0.0;
};

// Empty if all values are finite and within the tolerance. Otherwise one line: how many are not, and the index, both
// values and the bound of the one that exceeds its bound the most, or of the first that is not finite.
std::string compare(std::span<const float> actual, std::span<const double> expected, Tolerance tolerance);
std::string compare(std::span<const float> actual, std::span<const float> expected, Tolerance tolerance);

// Empty if both have the same bytes and no NaN. +0 and -0 have different bytes. Otherwise one line, as above.
std::string compare_bits(std::span<const float> actual, std::span<const float> expected);

}  // namespace tests
