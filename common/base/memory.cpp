#include "common/base/memory.h"

#include <limits>
#include <new>

#include "common/base/platform.h"

namespace common {

FloatArray allocate_floats(std::size_t size) {
  constexpr std::size_t kHugePage = std::size_t{1} << 21;
  constexpr std::size_t kLine = 64;
  if (size > std::numeric_limits<std::size_t>::max() / sizeof(float) - kHugePage) {
    throw std::bad_alloc();
  }
  const std::size_t alignment = size * sizeof(float) < kHugePage ? kLine : kHugePage;
  const std::size_t bytes = (size * sizeof(float) + alignment - 1) / alignment * alignment;
  void* const data = std::aligned_alloc(alignment, bytes == 0 ? alignment : bytes);
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  if (alignment == kHugePage) {
    advise_huge_pages(data, bytes);
  }
  return FloatArray(static_cast<float*>(data));
}

}  // namespace common
