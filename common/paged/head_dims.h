// The head dimensions that the kernels for tensor cores are compiled for.
#pragma once

#include <string>
#include <type_traits>
#include <utility>

#include "common/base/check.h"

namespace common {

using HeadDims = std::integer_sequence<int, 32, 64, 96, 128, 256>;

template <typename Run, int... kHeadDims>
bool run_with_head_dim(int head_dim, const Run& run, std::integer_sequence<int, kHeadDims...> /*all*/) {
  return ((head_dim == kHeadDims && (run(std::integral_constant<int, kHeadDims>{}), true)) || ...);
}

// Calls `run` with head_dim as a constant: run(std::integral_constant<int, 128>{}).
template <typename Run>
void with_head_dim(int head_dim, const Run& run) {
  COMMON_CHECK(run_with_head_dim(head_dim, run, HeadDims{}), "there are kernels for this head dimension");
}

inline bool is_head_dim(int head_dim) {
  return run_with_head_dim(
      head_dim, [](auto) {}, HeadDims{});
}

// "32, 64, 96, 128 or 256"
template <int kFirst, int... kOthers>
std::string list_head_dims(std::integer_sequence<int, kFirst, kOthers...> /*all*/) {
  std::string text = std::to_string(kFirst);
  int num_left = sizeof...(kOthers);
  ((text += (--num_left > 0 ? ", " : " or ") + std::to_string(kOthers)), ...);
  return text;
}
inline std::string list_head_dims() { return list_head_dims(HeadDims{}); }

}  // namespace common
