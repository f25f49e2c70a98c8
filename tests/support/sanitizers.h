// Whether the tests run under a sanitizer, where everything takes ten to thirty times longer.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // gcc
#define TESTS_SANITIZED 1
#elif defined(__has_feature)  // clang
#define TESTS_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define TESTS_SANITIZED 0
#endif

namespace tests {

inline constexpr bool kSanitized = TESTS_SANITIZED != 0;

}  // namespace tests
