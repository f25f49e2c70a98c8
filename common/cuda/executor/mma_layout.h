// Which number of an mma's matrices each lane holds in which register. The executor multiplies by it, and stage 7 draws
// it.
#pragma once

namespace common::executor {

struct MatrixPlace {
  int row = 0;
  int column = 0;
};

// The left matrix, [16, 16]: four registers of two numbers each. The first of the two is in the lower half.
constexpr MatrixPlace left_place(int lane, int index, int half) {
  return {lane / 4 + index % 2 * 8, 2 * (lane % 4) + half + index / 2 * 8};
}

// The right one, [16, 8]: two registers of two numbers each.
constexpr MatrixPlace right_place(int lane, int index, int half) {
  return {2 * (lane % 4) + half + index * 8, lane / 4};
}

// The result, [16, 8]: four registers of a float each.
constexpr MatrixPlace result_place(int lane, int index) {
  return {lane / 4 + index / 2 * 8, 2 * (lane % 4) + index % 2};
}

}  // namespace common::executor
