// The copy engine's description of a matrix.
#pragma once

#include <cuda.h>

namespace common {

// matrix: a device pointer to [rows, cols] of bfloat16 or float8. A copy brings box_rows rows of a panel (ptx.cuh).
CUtensorMap matrix_map(const void* matrix, int rows, int cols, int box_rows, bool is_float8 = false);

}  // namespace common
