// Float8 as K and V are stored: which numbers it has, and what a row becomes with a scale of its own.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "common/math/sampling.h"
#include "tests/support/catch.h"
#include "tests/support/float8.h"

using tests::float8_byte;
using tests::float8_exponent;
using tests::float8_value;
using tests::through_float8;

TEST_CASE("float8: 126 positive numbers from 2^-9 to 448, zero and a NaN, with either sign") {
  std::set<double> numbers;
  for (int byte = 1; byte < 0x7F; ++byte) {
    const double value = float8_value(static_cast<std::uint8_t>(byte));
    CHECK(numbers.insert(value).second);
    CHECK(float8_value(static_cast<std::uint8_t>(byte | 0x80)) == -value);
    CHECK(float8_byte(value) == byte);
  }
  CHECK(numbers.size() == 126);
  CHECK(*numbers.begin() == std::ldexp(1.0, -9));
  CHECK(*numbers.rbegin() == 448.0);
  CHECK(float8_value(0) == 0.0);
  CHECK(std::isnan(float8_value(0x7F)));
  CHECK(float8_value(0x38) == 1.0);
  CHECK(float8_value(0x39) == 1.125);
}

TEST_CASE("float8: to nearest, ties to even, and never beyond 448") {
  CHECK(float8_byte(1.06) == 0x38);
  CHECK(float8_byte(1.0625) == 0x38);  // between 1 and 1.125
  CHECK(float8_byte(1.1875) == 0x3A);  // between 1.125 and 1.25
  CHECK(float8_byte(460.0) == 0x7E);
  CHECK(float8_byte(1e9) == 0x7E);
  CHECK(float8_byte(-3.0) == 0xC4);
  CHECK(float8_byte(std::ldexp(1.0, -10)) == 0);  // half the smallest number
}

TEST_CASE("float8: a row's largest element lies between 224 and 448 scales, and a scale rounds nothing") {
  common::Random random(1);
  for (int i = 0; i < 2000; ++i) {
    const double largest = std::exp(20.0 * random.uniform() - 10.0);
    const double scaled = std::ldexp(largest, -float8_exponent(largest));
    CHECK(scaled > 224.0);
    CHECK(scaled <= 448.0);
  }
  CHECK(float8_exponent(448.0) == 0);
  CHECK(float8_exponent(448.1) == 1);
  CHECK(float8_exponent(0.0) == -40);
  // Rows that differ by a power of 2 are rounded in the same way.
  const std::vector<float> row = {1.0F, -0.3F, 0.07F, 3.3F};
  std::vector<float> larger = row;
  for (float& x : larger) {
    x *= 1024.0F;
  }
  const std::vector<float> stored = through_float8(row, 4);
  const std::vector<float> stored_larger = through_float8(larger, 4);
  for (std::size_t i = 0; i < row.size(); ++i) {
    CHECK(stored_larger[i] == 1024.0F * stored[i]);
  }
}

TEST_CASE("float8: 15 powers of 2 below the largest, an element is off by a sixteenth of itself at most") {
  common::Random random(2);
  constexpr std::size_t kHeadDim = 128;
  std::vector<float> rows(100 * kHeadDim);
  for (float& x : rows) {
    x = static_cast<float>(random.normal());
  }
  const std::vector<float> stored = through_float8(rows, kHeadDim);
  double squares = 0.0;
  double error_squares = 0.0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double error = std::abs(static_cast<double>(stored[i]) - rows[i]);
    if (std::abs(rows[i]) > std::ldexp(1.0, -12)) {  // the largest of a row is above 2 or so
      CHECK(error <= std::abs(rows[i]) / 16.0);
    }
    squares += static_cast<double>(rows[i]) * rows[i];
    error_squares += error * error;
    // A bfloat16 has 8 bits of mantissa, so every stored number is a bfloat16.
    std::uint32_t bits = 0;
    std::memcpy(&bits, &stored[i], sizeof bits);
    CHECK((bits & 0xFFFF) == 0);
  }
  const double relative = std::sqrt(error_squares / squares);
  CAPTURE(relative);
  CHECK(relative > 0.02);  // a step of 1/8 of the power of 2 below, and errors spread evenly over half of it: 2.6 %
  CHECK(relative < 0.03);
}
