// Memory for large arrays of floats.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace common {

struct Free {
  void operator()(float* data) const { std::free(data); }  // NOLINT(cppcoreguidelines-no-malloc)
};
using FloatArray = std::unique_ptr<float[], Free>;

// `size` uninitialised floats, aligned to at least 64 bytes. Large arrays are in huge pages where the system has them:
// scattered reads then cause fewer TLB misses, but touching one byte makes a whole page of 2 MiB resident.
// Throws std::bad_alloc.
FloatArray allocate_floats(std::size_t size);

}  // namespace common
