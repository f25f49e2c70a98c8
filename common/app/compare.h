// The comparer all tests use. NaN and infinity never pass: the condition is written so that they fail it.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace common {

struct Tolerance {
  double absolute = 0.0;
  double relative = 0.0;
};

// Empty if for every i: isfinite(actual[i]), isfinite(expected[i]) and
// !(|actual - expected| > absolute + relative * |expected|) holds as !(error <= bound) never being true.
// Otherwise one line: how many differ, and the worst (or first non-finite) index with both values and the bound.
std::string compare(std::span<const float> actual, std::span<const double> expected, Tolerance tolerance);
std::string compare(std::span<const float> actual, std::span<const float> expected, Tolerance tolerance);

// Empty if both have the same bytes, size included (so -0 differs from +0, and equal NaNs are still refused).
std::string compare_bits(std::span<const float> actual, std::span<const float> expected);

}  // namespace common
