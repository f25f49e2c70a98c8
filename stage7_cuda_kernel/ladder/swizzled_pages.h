// The order of the pages that step 7 and the prompts' step 3 read: what one copy brings is what tensor cores read.
//
// A row of 128 dimensions in 16 bits is 16 vectors of 16 bytes. It is cut into two halves: the first halves of all rows
// of a block lie together, in panel 0, and behind them the second halves, in panel 1. In a half, vector v of row r is
// at place v ^ r % 8:
//
//     panel 0: dimensions 0-63                 panel 1: dimensions 64-127
//     row 0    0 1 2 3 4 5 6 7                 row 0    8  9 10 11 12 13 14 15      2 KB each; one after the other
//     row 1    1 0 3 2 5 4 7 6                 row 1    9  8 11 10 13 12 15 14
//     row 2    2 3 0 1 6 7 4 5                 …
//     …        (row 15 is like row 7)
//
// (common/paged/page_layout.h has this for rows of every length.)
#pragma once

#include "common/cuda/host_device.h"

namespace stage7 {

inline constexpr int kVecBytes = 16;
inline constexpr int kPanelVecs = 8;

// Where vector `vec` (0 to 15) of row `row` lies, in vectors from the beginning of one head's part of a block.
// num_rows: of the block.
COURSE_HOST_DEVICE constexpr int swizzled_place(int num_rows, int row, int vec) {
  const int vec_in_panel = vec & 7;
  return (vec - vec_in_panel) * num_rows + row * kPanelVecs + (vec_in_panel ^ (row & 7));
}

}  // namespace
