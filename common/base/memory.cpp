#include "common/base/memory.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "common/base/platform.h"

namespace common {

void Free::operator()(float* data) const {
  if (mapping != nullptr) {
    unmap_pages(mapping, mapped_bytes);
  } else {
    std::free(data);  // NOLINT(cppcoreguidelines-no-malloc)
  }
}

FloatArray allocate_floats(std::size_t size) {
  constexpr std::size_t kHugePage = std::size_t{1} << 21;
  constexpr std::size_t kLine = 64;
  if (size > std::numeric_limits<std::size_t>::max() / sizeof(float) - kHugePage) {
    throw std::bad_alloc();
  }
  const std::size_t bytes = size * sizeof(float);
  if (bytes < kHugePage) {
    void* const data = std::aligned_alloc(kLine, std::max((bytes + kLine - 1) / kLine * kLine, kLine));
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    return FloatArray(static_cast<float*>(data));
  }
  const std::size_t aligned_bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  std::size_t space = aligned_bytes + kHugePage;
  const Free mapped{map_pages(space), space};
  if (mapped.mapping == nullptr) {
    throw std::bad_alloc();
  }
  void* data = mapped.mapping;
  std::align(kHugePage, aligned_bytes, data, space);
  advise_huge_pages(data, aligned_bytes);
  return {static_cast<float*>(data), mapped};
}

}  // namespace common
