// The clock, memory and the read bandwidth.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/memory.h"
#include "common/base/platform.h"
#include "tests/support/catch.h"

namespace {

using common::CheckError;

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace

TEST_CASE("machine: the clock goes forward, in seconds") {
  const double start = common::now_seconds();
  sleep_ms(20);
  const double passed = common::now_seconds() - start;
  CHECK(passed >= 0.02);
  CHECK(passed < 10.0);
}

TEST_CASE("machine: peak memory is in bytes and covers what was touched") {
  constexpr std::size_t kBytes = std::size_t{96} << 20U;
  const std::vector<char> touched(kBytes, 'x');
  CHECK(touched[kBytes / 2] == 'x');
  const std::int64_t peak = common::peak_resident_bytes();
  CHECK(peak >= static_cast<std::int64_t>(kBytes));
  CHECK(peak < std::int64_t{1} << 40U);
}

TEST_CASE("machine: read bandwidth is measured for the given time, by any number of threads") {
  for (const int threads : {1, 2, 3}) {
    CAPTURE(threads);
    const double start = common::now_seconds();
    // Not a whole number of chunks, and not a multiple of the threads.
    const double bandwidth = common::measure_read_bandwidth(threads, (std::size_t{4} << 20U) + 1000, 0.05);
    CHECK(common::now_seconds() - start >= 0.05);
    // Slower than a hard disk or faster than any cache would be a wrong unit.
    CHECK(bandwidth > 1e8);
    CHECK(bandwidth < 1e14);
  }
  CHECK_THROWS_AS(common::measure_read_bandwidth(0, 1U << 20U, 0.01), CheckError);
  CHECK_THROWS_AS(common::measure_read_bandwidth(4, 100, 0.01), CheckError);
}

#ifdef __linux__
TEST_CASE("memory: a large array gives its addresses back, whatever was allocated after it") {
  const auto num_pages = [] {  // of all addresses, as ulimit -v counts them
    std::int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages;
  };
  common::keep_freed_memory();  // as every program of the course begins
  const std::int64_t before = num_pages();
  std::vector<std::vector<char>> later;
  for (int round = 0; round < 4; ++round) {
    CAPTURE(round);
    const std::size_t size = (std::size_t{3} << 20U) + 5;
    const common::FloatArray floats = common::allocate_floats(size);
    CHECK(reinterpret_cast<std::uintptr_t>(floats.get()) % (std::uintptr_t{1} << 21U) == 0);
    floats[0] = 1.0F;
    floats[size - 1] = 2.0F;
    CHECK(floats[0] + floats[size - 1] == 3.0F);
    later.emplace_back(std::size_t{1} << 16U, 'x');
  }
  constexpr std::int64_t kPage = 4096;
  CHECK((num_pages() - before) * kPage < std::int64_t{4} << 20U);
}
#endif
