#include "tests/support/compare.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/base/text.h"

namespace tests {
namespace {

using common::format;

std::string sizes_differ(std::size_t actual, std::size_t expected) {
  return format("sizes differ: actual has %zu values, expected has %zu", actual, expected);
}

// %.9g shows every float exactly enough to be read back; the expected value may be a double.
template <typename Expected>
std::string describe(const char* what, std::size_t index, float actual, Expected expected) {
  return format("%s at [%zu]: actual %.9g, expected %.9g", what, index, static_cast<double>(actual),
                static_cast<double>(expected));
}

template <typename Expected>
std::string compare_values(std::span<const float> actual, std::span<const Expected> expected, Tolerance tolerance) {
  if (actual.size() != expected.size()) {
    return sizes_differ(actual.size(), expected.size());
  }
  const auto bound_at = [&](std::size_t i) {
    return tolerance.absolute + tolerance.relative * std::abs(static_cast<double>(expected[i]));
  };
  std::size_t num_different = 0;
  std::size_t worst = 0;
  double worst_excess = 0.0;
  bool non_finite = false;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
    const bool finite = std::isfinite(actual[i]) && std::isfinite(expected[i]);
    // Not "error > bound", which is false if either side is NaN.
    if (finite && error <= bound_at(i)) {
      continue;
    }
    ++num_different;
    if (non_finite) {
      continue;  // the first non-finite value is what gets reported
    }
    const double excess = error - bound_at(i);
    if (!finite || num_different == 1 || excess > worst_excess) {
      worst = i;
      worst_excess = excess;
      non_finite = !finite;
    }
  }
  if (num_different == 0) {
    return "";
  }
  return format("%zu of %zu differ, ", num_different, actual.size()) +
         describe(non_finite ? "first non-finite" : "worst", worst, actual[worst], expected[worst]) +
         format(", bound %.3g", bound_at(worst));
}

}  // namespace

std::string compare(std::span<const float> actual, std::span<const double> expected, Tolerance tolerance) {
  return compare_values(actual, expected, tolerance);
}

std::string compare(std::span<const float> actual, std::span<const float> expected, Tolerance tolerance) {
  return compare_values(actual, expected, tolerance);
}

std::string compare_bits(std::span<const float> actual, std::span<const float> expected) {
  if (actual.size() != expected.size()) {
    return sizes_differ(actual.size(), expected.size());
  }
  std::size_t num_different = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const bool same = std::bit_cast<std::uint32_t>(actual[i]) == std::bit_cast<std::uint32_t>(expected[i]);
    if (same && !std::isnan(actual[i])) {
      continue;
    }
    if (num_different == 0) {
      first = i;
    }
    ++num_different;
  }
  if (num_different == 0) {
    return "";
  }
  return format("%zu of %zu differ in their bits, ", num_different, actual.size()) +
         describe("first", first, actual[first], expected[first]) +
         format(" (0x%08x, 0x%08x)", std::bit_cast<std::uint32_t>(actual[first]),
                std::bit_cast<std::uint32_t>(expected[first]));
}

}  // namespace tests
