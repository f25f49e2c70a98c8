// How much memory a computation takes from the heap at any one time, counted where it is taken: in malloc.
//
// To be included by one file of a program: it replaces malloc and its kin by functions that count and hand on to the C
// library's own. Without glibc, and under a sanitizer, which has a malloc of its own, TESTS_HEAP_PEAK is not defined.
#pragma once

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TESTS_SANITIZER
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TESTS_SANITIZER
#endif

#if defined(__GLIBC__) && !defined(TESTS_SANITIZER)
#define TESTS_HEAP_PEAK

namespace tests {

inline std::atomic<std::ptrdiff_t> heap_live{0};  // bytes
inline std::atomic<std::ptrdiff_t> heap_most{0};  // the largest value of heap_live so far

inline void* count_allocated(void* memory) {
  if (memory != nullptr) {
    const auto size = static_cast<std::ptrdiff_t>(malloc_usable_size(memory));
    const std::ptrdiff_t live = heap_live.fetch_add(size) + size;
    std::ptrdiff_t most = heap_most.load();
    while (live > most && !heap_most.compare_exchange_weak(most, live)) {
    }
  }
  return memory;
}

inline void count_freed(void* memory) {
  if (memory != nullptr) {
    heap_live.fetch_sub(static_cast<std::ptrdiff_t>(malloc_usable_size(memory)));
  }
}

// The most bytes that the call had allocated at one time, on all threads together.
inline std::ptrdiff_t heap_peak(const std::function<void()>& action) {
  const std::ptrdiff_t before = heap_live.load();
  heap_most = before;
  action();
  return heap_most.load() - before;
}

}  // namespace tests

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
  return *memory == nullptr ? 12 : 0;  // ENOMEM
}
void free(void* memory) noexcept {
  tests::count_freed(memory);
  __libc_free(memory);
}
}
#endif
