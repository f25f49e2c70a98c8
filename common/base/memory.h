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

// `size` floats, not initialised, aligned to 64 bytes at least. In huge pages where the system has them: reading far
// apart then misses fewer address translations, but each page of 2 MiB is resident as a whole once it is touched.
// Throws std::bad_alloc.
FloatArray allocate_floats(std::size_t size);

}  // namespace common
