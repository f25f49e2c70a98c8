// Reads memory as fast as possible: an upper bound for every kernel that reads the same number of bytes.
#pragma once

#include <cstddef>

#include "common/cuda/runtime/device.h"

namespace common {

// Enqueues a kernel that only reads all bytes, a multiple of 16: loads of 16 bytes, 8 in flight for each thread.
void read_memory(const Stream& stream, const void* memory, std::size_t bytes);

}  // namespace common
