// main() of the test programs, compiled once: with Catch2 2.13 this file takes long to compile.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "tests/support/catch.h"

#include <atomic>
#include <iostream>

namespace {

// The SKIP_RETURN_CODE in tests/CMakeLists.txt.
constexpr int kSkippedExitCode = 77;
std::atomic<int> num_skipped{0};

}  // namespace

namespace tests {

void note_skipped(const std::string& reason) {
  ++num_skipped;
  std::cout << "skipped: " << Catch::getResultCapture().getCurrentTestName() << ": " << reason << std::endl;
}

}  // namespace tests

int main(int argc, char** argv) {
  const int result = Catch::Session().run(argc, argv);
  // Catch2 returns the number of failures, which might be 77 too.
  return result != 0 ? 1 : num_skipped > 0 ? kSkippedExitCode : 0;
}
