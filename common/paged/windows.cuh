// The kernels for prompts are compiled with sliding windows and without: see KERNELS.md.
#pragma once

#include <type_traits>

#include "common/cuda/ptx.cuh"

namespace common {

// Kernels with windows are right without one too. On the host, where compiling takes longest, there are no others.
#ifdef COURSE_EXECUTOR
inline constexpr bool kOnlyWithWindows = true;
#else
inline constexpr bool kOnlyWithWindows = false;
#endif

// Calls `run` with a constant: whether kernels with windows are to be launched.
template <typename Run>
void with_windows(int window, const Run& run) {
  if constexpr (!kOnlyWithWindows) {
    if (window == 0) {
      return run(std::false_type{});
    }
  }
  run(std::true_type{});
}

// The token by which a token's block is looked up: a block in front of first_seen may be another sequence's by now, so
// first_seen's is copied in its place.
template <bool kWindows>
__device__ __forceinline__ int token_looked_up(int token, int first_seen) {
  return kWindows ? max(token, first_seen) : token;
}

}  // namespace common
