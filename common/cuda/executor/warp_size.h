// How many threads go through a kernel together.
#pragma once

namespace common::executor {

inline constexpr int kWarpThreads = 32;

}  // namespace common::executor
