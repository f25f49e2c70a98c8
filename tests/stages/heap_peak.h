// How much memory a computation takes from the heap at any one time, counted where it is taken: in malloc.
//
// A program that links heap_peak.cpp has its malloc and its kin replaced by functions that count and hand on to the C
// library's own. Without glibc, and under a sanitizer, which has a malloc of its own, TESTS_HEAP_PEAK is not defined.
#pragma once

#include <cstddef>
#include <functional>

#include "tests/support/sanitizers.h"

#if defined(__GLIBC__) && !TESTS_SANITIZED
#define TESTS_HEAP_PEAK

namespace tests {

// The most bytes that the call had allocated at one time, on all threads together.
std::ptrdiff_t heap_peak(const std::function<void()>& action);

}  // namespace tests
#endif
