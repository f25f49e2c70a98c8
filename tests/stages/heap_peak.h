// The peak of a computation's memory on the heap, counted in malloc.
//
// In a program that links heap_peak.cpp, malloc and its relatives are replaced by functions that count and then call
// the C library's own. Without glibc, and under a sanitizer, which has a malloc of its own, TESTS_HEAP_PEAK is not
// defined.
#pragma once

#include <cstddef>
#include <functional>

#include "tests/support/sanitizers.h"

#if defined(__GLIBC__) && !TESTS_SANITIZED
#define TESTS_HEAP_PEAK

namespace tests {

// The most bytes that were allocated at one time during the call, by all threads together.
std::ptrdiff_t heap_peak(const std::function<void()>& action);

}  // namespace tests
#endif
