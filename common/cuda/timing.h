// How kernels are timed, and the machine's own yardstick.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "common/cuda/device.h"

namespace common {

// Microseconds a call. call(i) enqueues the i-th of num_calls calls; all of them become one CUDA graph, which is
// replayed for about `budget` microseconds, but at least three times. The median, because a replay can be disturbed.
double microseconds_per_call(const Stream& stream, int num_calls, const std::function<void(int)>& call,
                             double budget = 60e3);

// Reads all bytes (a multiple of 16) and does nothing with them: 16-byte loads, 8 under way a thread.
void read_memory(const Stream& stream, const void* memory, std::size_t bytes);

// GB/s of read_memory over memory that is far larger than the L2 cache.
double read_ceiling(const Stream& stream, const void* memory, std::size_t bytes);

// "NVIDIA H200, driver 580.159.04, CUDA 13.0, read ceiling 4,560 GB/s"
std::string machine_line(double ceiling);

// 6.02, 12.8, 251, 16,020: three digits or more.
std::string format_microseconds(double microseconds);

}  // namespace
