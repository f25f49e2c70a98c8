// How much memory a computation takes from the heap at any one time, counted where it is taken: in malloc.
//
// A program that links heap_peak.cpp has its malloc and its kin replaced by functions that count and hand on to the C
// library's own. Without glibc, and under a sanitizer, which has a malloc of its own, TESTS_HEAP_PEAK is not defined.
#pragma once

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

// The most bytes that the call had allocated at one time, on all threads together.
std::ptrdiff_t heap_peak(const std::function<void()>& action);

}  // namespace tests
#endif
