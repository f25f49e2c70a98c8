// The 16-bit type of the kernels for tensor cores.
#pragma once

#include <cuda_bf16.h>

namespace common {

// Where tensor cores compute, queries and outputs have this type; so have K and V, unless they are stored as float8.
using Element = __nv_bfloat16;

}  // namespace common
