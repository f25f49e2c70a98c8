// Keeps registers free.
#pragma once

#include <cstdint>

namespace common {

// Returns x, but hides that from the compiler: it then computes what depends on x again for every tile, instead of
// keeping the results from tile to tile in registers; no registers are left. (Without it, one prompt of 8,192 tokens is
// computed 5 % slower on an H200.)
__device__ __forceinline__ std::uint32_t fresh(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace common
