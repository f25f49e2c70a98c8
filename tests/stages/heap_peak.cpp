#include "tests/stages/heap_peak.h"

#ifdef TESTS_HEAP_PEAK

#include <malloc.h>

#include <atomic>
#include <cerrno>

namespace tests {
namespace {

std::atomic<std::ptrdiff_t> live{0};  // bytes
std::atomic<std::ptrdiff_t> most{0};  // the largest value of `live` so far

void* count_allocated(void* memory) {
  if (memory != nullptr) {
    const auto size = static_cast<std::ptrdiff_t>(malloc_usable_size(memory));
    const std::ptrdiff_t now = live.fetch_add(size) + size;
    std::ptrdiff_t before = most.load();
    while (now > before && !most.compare_exchange_weak(before, now)) {
    }
  }
  return memory;
}

void count_freed(void* memory) {
  if (memory != nullptr) {
    live.fetch_sub(static_cast<std::ptrdiff_t>(malloc_usable_size(memory)));
  }
}

}  // namespace

std::ptrdiff_t heap_peak(const std::function<void()>& action) {
  const std::ptrdiff_t before = live.load();
  most = before;
  action();
  return most.load() - before;
}

}  // namespace tests

// The names are the C library's.
// NOLINTBEGIN(readability-identifier-naming, readability-inconsistent-declaration-parameter-name, bugprone-*)
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* memory, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void __libc_free(void* memory);

void* malloc(std::size_t size) noexcept { return tests::count_allocated(__libc_malloc(size)); }

void* calloc(std::size_t count, std::size_t size) noexcept {
  return tests::count_allocated(__libc_calloc(count, size));
}

void* realloc(void* memory, std::size_t size) noexcept {
  tests::count_freed(memory);
  return tests::count_allocated(__libc_realloc(memory, size));
}

void* memalign(std::size_t alignment, std::size_t size) noexcept {
  return tests::count_allocated(__libc_memalign(alignment, size));
}

void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return tests::count_allocated(__libc_memalign(alignment, size));
}

int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
  *memory = tests::count_allocated(__libc_memalign(alignment, size));
  return *memory == nullptr ? ENOMEM : 0;
}

void free(void* memory) noexcept {
  tests::count_freed(memory);
  __libc_free(memory);
}
}
// NOLINTEND(readability-identifier-naming, readability-inconsistent-declaration-parameter-name, bugprone-*)

#endif
