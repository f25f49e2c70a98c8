// Measures what this machine can do, to have something to compare timings with.
#pragma once

#include <cstddef>

namespace common {

// Bytes per second that `num_threads` threads read, each its own part of a buffer in order: the best of several passes.
// Allocates `bytes`, which should be far more than the caches hold, and takes about `seconds`.
double measure_read_bandwidth(int num_threads, std::size_t bytes = std::size_t{1} << 29, double seconds = 1.0);

// Seconds on a monotonic clock. Only differences mean something.
double now_seconds();

}  // namespace common
