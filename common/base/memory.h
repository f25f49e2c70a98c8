// Memory for large arrays of floats.
#pragma once

#include <cstddef>
#include <memory>

namespace common {

struct Free {
  void operator()(float* data) const;

  void* mapping = nullptr;  // what a large array lies in
  std::size_t mapped_bytes = 0;
};
using FloatArray = std::unique_ptr<float[], Free>;

// `size` uninitialised floats, aligned to at least 64 bytes. Large arrays are in huge pages where the system has them:
// scattered reads then cause fewer TLB misses, but touching one byte makes a whole page of 2 MiB resident. Freed, they
// give their addresses back at once: an array freed in the heap leaves a hole, which the next one of its size, aligned
// to 2 MiB, does not fit, and within a limit of addresses (ulimit -v) a cache could not be made anew.
// Throws std::bad_alloc.
FloatArray allocate_floats(std::size_t size);

}  // namespace common
