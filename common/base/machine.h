// Measures what this machine can do, to have something to compare timings with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace common {

// Bytes per second that `num_threads` threads read, each its own part of a buffer in order: the best of several passes.
// Allocates `bytes`, which should be far more than the caches hold, and takes about `seconds`.
double measure_read_bandwidth(int num_threads, std::size_t bytes = std::size_t{1} << 29, double seconds = 1.0);

// What bounds the speed of decoding: each step reads all weights, and K and V of the tokens before.
struct ReadLimit {
  std::int64_t weight_bytes = 0;
  std::int64_t bytes_per_slot = 0;
  double bytes_per_second = 0.0;  // the memory's speed
};

// Seconds on a monotonic clock. Only differences mean something.
double now_seconds();

}  // namespace common
