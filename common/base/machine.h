// What this machine can do, measured: the yardstick that timings are put beside.
#pragma once

#include <cstddef>

namespace common {

// The best of several reads of a buffer far larger than the caches, in bytes a second, by `num_threads` threads that
// each read their own part in order. Allocates `bytes` and takes about `seconds`.
double measure_read_bandwidth(int num_threads, std::size_t bytes = std::size_t{1} << 29, double seconds = 1.0);

// Seconds on a clock that only goes forward.
double now_seconds();

}  // namespace common
