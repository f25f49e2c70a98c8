// Times kernels, and measures the machine's read bandwidth to compare with.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "common/cuda/runtime/device.h"

namespace common {

// Microseconds per call. call(i) enqueues the i-th of num_calls calls on the stream. All of them become one CUDA graph,
// which is replayed for about `budget` microseconds, at least three times. The result is the median of the replays.
double microseconds_per_call(const Stream& stream, int num_calls, const std::function<void(int)>& call,
                             double budget = 60e3);

// GB/s of read_memory(). The memory should be far larger than the L2 cache.
double read_ceiling(const Stream& stream, const void* memory, std::size_t bytes);

// "NVIDIA H200, driver 580.159.04, CUDA 13.0, read ceiling 4,577 GB/s"
std::string machine_line(double ceiling);

// "6.02", "12.8", "251", "16,020": at least three significant digits.
std::string format_microseconds(double microseconds);

}  // namespace
