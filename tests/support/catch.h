// All tests include Catch2 through this file: versions 2.13 (Debian 12) and 3.x (Ubuntu 24.04) keep their headers in
// different places, and tests use only the macros that both have.
#pragma once

// Lets a failed comparison print pairs and optionals, too, and not {?}.
#define CATCH_CONFIG_ENABLE_ALL_STRINGMAKERS

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <string>

namespace tests {

// Notes that the running test case could not be tried on this machine. A program in which no test failed and at least
// one was skipped ends with exit code 77, which ctest reports as "Skipped", never as "Passed".
void note_skipped(const std::string& reason);

}  // namespace tests

// Leaves the test case if it needs a GPU or a file that is not there. (Catch2 has SKIP() from version 3.3 only.)
#define SKIP_TEST(reason)          \
  do {                             \
    ::tests::note_skipped(reason); \
    return;                        \
  } while (false)
