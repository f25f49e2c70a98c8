// Float8 as stages 7 and 8 store K and V, by its definition: the nearest of all e4m3 numbers. Shares nothing with the
// kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

namespace tests {

inline constexpr double kLargestFloat8 = 448.0;

// What a byte stands for. Sign, 4 bits of exponent, 3 of mantissa; no infinity.
inline double float8_value(std::uint8_t byte) {
  const int exponent = byte >> 3 & 15;
  const int mantissa = byte & 7;
  double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if (exponent == 15 && mantissa == 7) {
    size = std::nan("");
  }
  return (byte & 0x80) != 0 ? -size : size;
}

// The byte of the nearest number; on a tie, the one whose last bit is 0. Numbers beyond 448 become 448.
inline std::uint8_t float8_byte(double x) {
  static const std::vector<double> numbers = [] {  // by byte, ascending
    std::vector<double> all;
    all.reserve(0x7F);
    for (int byte = 0; byte < 0x7F; ++byte) {
      all.push_back(float8_value(static_cast<std::uint8_t>(byte)));
    }
    return all;
  }();
  const double size = std::abs(x);
  auto byte =
      std::lower_bound(numbers.begin(), numbers.end(), size) - numbers.begin();  // the first that is not smaller
  if (byte == std::ssize(numbers)) {
    --byte;
  } else if (byte > 0) {
    const double to_next = numbers[static_cast<std::size_t>(byte)] - size;
    const double to_last = size - numbers[static_cast<std::size_t>(byte) - 1];
    if (to_last < to_next || (to_last == to_next && byte % 2 == 1)) {
      --byte;
    }
  }
  return static_cast<std::uint8_t>(byte | (std::signbit(x) ? 0x80 : 0));
}

// The exponent of a row's scale: the smallest e >= -40 with largest <= 448 * 2^e.
inline int float8_exponent(double largest) {
  int exponent = -40;
  while (largest > std::ldexp(kLargestFloat8, exponent)) {
    ++exponent;
  }
  return exponent;
}

// What rows of head_dim numbers become when they are stored.
inline std::vector<float> through_float8(std::span<const float> rows, std::size_t head_dim) {
  std::vector<float> result(rows.size());
  for (std::size_t begin = 0; begin < rows.size(); begin += head_dim) {
    double largest = 0.0;
    for (const float x : rows.subspan(begin, head_dim)) {
      largest = std::max(largest, static_cast<double>(std::abs(x)));
    }
    const int exponent = float8_exponent(largest);
    for (std::size_t i = begin; i < begin + head_dim; ++i) {
      result[i] = static_cast<float>(
          std::ldexp(float8_value(float8_byte(std::ldexp(static_cast<double>(rows[i]), -exponent))), exponent));
    }
  }
  return result;
}

}  // namespace tests
