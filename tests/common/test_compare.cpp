// The comparer that all tests use.
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/messages.h"

namespace {

using tests::contains;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

TEST_CASE("compare: the bound is absolute + relative * |expected|, and belongs to it") {
  using Floats = std::vector<float>;
  using Doubles = std::vector<double>;
  CHECK(tests::compare(Floats{}, Doubles{}, {}).empty());
  CHECK(tests::compare(Floats{1.0F, -2.0F}, Doubles{1.0, -2.0}, {}).empty());
  CHECK(tests::compare(Floats{0.0F}, Floats{-0.0F}, {}).empty());
  CHECK_FALSE(tests::compare(Floats{1.0F}, Doubles{std::nextafter(1.0, 2.0)}, {}).empty());

  const float above = std::nextafter(5.5F, 9.0F);
  for (const float sign : {1.0F, -1.0F}) {
    CAPTURE(sign);
    const Doubles expected = {4.0 * sign};
    CHECK(tests::compare(Floats{5.5F * sign}, expected, {.absolute = 0.5, .relative = 0.25}).empty());
    CHECK_FALSE(tests::compare(Floats{above * sign}, expected, {.absolute = 0.5, .relative = 0.25}).empty());
    CHECK(tests::compare(Floats{5.5F * sign}, expected, {.absolute = 1.5}).empty());
    CHECK_FALSE(tests::compare(Floats{above * sign}, expected, {.absolute = 1.5}).empty());
    CHECK(tests::compare(Floats{5.0F * sign}, expected, {.relative = 0.25}).empty());
    CHECK_FALSE(tests::compare(Floats{5.0F * sign}, expected, {.relative = 0.24}).empty());
  }
}

TEST_CASE("compare: NaN and infinity never pass, on either side, at any tolerance") {
  const tests::Tolerance generous = {.absolute = std::numeric_limits<double>::infinity(), .relative = 1.0};
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    for (const float other : {1.0F, bad}) {
      CAPTURE(bad, other);
      CHECK_FALSE(tests::compare(std::vector<float>{bad}, std::vector<float>{other}, generous).empty());
      CHECK_FALSE(tests::compare(std::vector<float>{other}, std::vector<float>{bad}, generous).empty());
      CHECK_FALSE(tests::compare(std::vector<float>{bad}, std::vector<double>{other}, generous).empty());
      CHECK_FALSE(tests::compare(std::vector<float>{other}, std::vector<double>{bad}, generous).empty());
    }
  }
  // A tolerance that is NaN allows nothing.
  CHECK_FALSE(tests::compare(std::vector<float>{1.0F}, std::vector<float>{1.0F},
                             {.absolute = std::numeric_limits<double>::quiet_NaN()})
                  .empty());
}

TEST_CASE("compare: one line says how many differ and which is worst") {
  const std::vector<double> expected = {1.0, 2.0, 3.0, 4.0};
  CHECK(tests::compare(std::vector<float>{1.0F, 2.5F, 3.75F, 4.5F}, expected, {.absolute = 0.25}) ==
        "3 of 4 differ, worst at [2]: actual 3.75, expected 3, bound 0.25");
  // The worst value exceeds its bound the most; its error need not be the largest.
  CHECK(tests::compare(std::vector<float>{1.5F, 2.0F, 3.0F, 4.75F}, expected, {.relative = 0.125}) ==
        "2 of 4 differ, worst at [0]: actual 1.5, expected 1, bound 0.125");
  // The first value that is not finite, before and after worse neighbours.
  CHECK(tests::compare(std::vector<float>{99.0F, kNan, kInfinity, 99.0F}, expected, {.absolute = 0.25}) ==
        "4 of 4 differ, first non-finite at [1]: actual nan, expected 2, bound 0.25");
  CHECK(tests::compare(std::vector<float>{1.0F}, expected, {}) == "sizes differ: actual has 1 values, expected has 4");
  CHECK(tests::compare(std::vector<float>{}, std::vector<float>{1.0F}, {}) ==
        "sizes differ: actual has 0 values, expected has 1");
}

TEST_CASE("compare_bits: the same bytes, and no NaN") {
  using Floats = std::vector<float>;
  CHECK(tests::compare_bits(Floats{}, Floats{}).empty());
  CHECK(tests::compare_bits(Floats{1.0F, -0.0F, 1e-45F}, Floats{1.0F, -0.0F, 1e-45F}).empty());
  CHECK(tests::compare_bits(Floats{1.0F, 0.0F, -0.0F}, Floats{1.0F, -0.0F, 0.0F}) ==
        "2 of 3 differ in their bits, first at [1]: actual 0, expected -0 (0x00000000, 0x80000000)");
  CHECK_FALSE(tests::compare_bits(Floats{1.0F}, Floats{std::nextafter(1.0F, 2.0F)}).empty());
  CHECK(contains(tests::compare_bits(Floats{0.0F, kNan}, Floats{0.0F, kNan}), "1 of 2 differ"));
  CHECK(tests::compare_bits(Floats{1.0F}, Floats{1.0F, 2.0F}) == "sizes differ: actual has 1 values, expected has 2");
}
