// parallel_for and its threads.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/parallel.h"
#include "tests/support/catch.h"
#include "tests/support/thread_count.h"

namespace {

using common::CheckError;
using tests::ThreadCount;

using Range = std::pair<int, int>;

std::vector<Range> ranges_of(int count) {
  std::mutex mutex;
  std::vector<Range> ranges;
  common::parallel_for(count, [&](int begin, int end) {
    const std::lock_guard lock(mutex);
    ranges.emplace_back(begin, end);
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace

TEST_CASE("parallel_for: every index exactly once, at most one contiguous range for each thread") {
  for (int threads = 1; threads <= 5; ++threads) {
    const ThreadCount use(threads);
    CHECK(common::num_threads() == threads);
    for (const int count : {0, 1, threads - 1, threads, threads + 1, 1000}) {
      CAPTURE(threads, count);
      std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
      std::atomic<int> calls = 0;
      std::atomic<int> empty_calls = 0;
      common::parallel_for(count, [&](int begin, int end) {
        ++calls;
        empty_calls += begin >= end ? 1 : 0;
        for (int i = begin; i < end; ++i) {
          ++visits[static_cast<std::size_t>(i)];
        }
      });
      CHECK(calls == std::min(threads, count));
      CHECK(empty_calls == 0);
      CHECK(std::all_of(visits.begin(), visits.end(), [](const std::atomic<int>& n) { return n == 1; }));
    }
  }
}

TEST_CASE("parallel_for: ranges depend on count and number of threads alone") {
  const ThreadCount use(3);
  const std::vector<Range> expected = {{0, 3}, {3, 6}, {6, 10}};
  for (int repeat = 0; repeat < 20; ++repeat) {
    REQUIRE(ranges_of(10) == expected);
  }
  // 3 * 2^30 passes 2^31.
  const std::vector<Range> large = ranges_of(1 << 30);
  CHECK(large == std::vector<Range>{{0, 357913941}, {357913941, 715827882}, {715827882, 1073741824}});
}

TEST_CASE("parallel_for: nested calls run on the calling thread, with the same ranges") {
  const ThreadCount use(3);
  std::atomic<int> strangers = 0;
  std::atomic<int> right = 0;
  common::parallel_for(3, [&](int, int) {
    const std::thread::id outer = std::this_thread::get_id();
    std::vector<Range> ranges;  // unprotected: only one thread may touch it
    common::parallel_for(10, [&](int begin, int end) {
      strangers += std::this_thread::get_id() == outer ? 0 : 1;
      ranges.emplace_back(begin, end);
    });
    right += ranges == std::vector<Range>{{0, 3}, {3, 6}, {6, 10}} ? 1 : 0;
  });
  CHECK(strangers == 0);
  CHECK(right == 3);
}

TEST_CASE("parallel_for: threads really run at the same time, the caller among them") {
  const ThreadCount use(3);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::atomic<int> arrived = 0;
  // Each body waits for the other two: one after another, they would never end. The time limit turns that into a
  // failure.
  const double limit = common::now_seconds() + 30.0;
  common::parallel_for(3, [&](int, int) {
    {
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    }
    ++arrived;
    while (arrived < 3 && common::now_seconds() < limit) {
      std::this_thread::yield();
    }
  });
  CHECK(arrived == 3);
  CHECK(ids.size() == 3);
  CHECK(ids.count(std::this_thread::get_id()) == 1);
}

TEST_CASE("parallel_for: rethrows the first exception when all are done") {
  for (const int threads : {1, 2, 4}) {
    CAPTURE(threads);
    const ThreadCount use(threads);
    for (int thrower = 0; thrower < threads; ++thrower) {
      std::atomic<int> finished = 0;
      std::string caught;
      try {
        common::parallel_for(threads, [&](int begin, int) {
          if (begin == thrower) {
            throw std::runtime_error("range " + std::to_string(begin));
          }
          sleep_ms(5);
          ++finished;
        });
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
      CHECK(caught == "range " + std::to_string(thrower));
      CHECK(finished == threads - 1);
    }
    CHECK(ranges_of(100).size() == static_cast<std::size_t>(threads));  // still works
  }

  const ThreadCount use(3);
  std::string caught;
  try {
    common::parallel_for(3, [](int begin, int) {
      sleep_ms(begin == 1 ? 0 : 100 + 50 * begin);
      throw std::runtime_error(std::to_string(begin));
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  CHECK(caught == "1");
}

TEST_CASE("parallel_for: an exception inside a nested call reaches the outer caller") {
  const ThreadCount use(2);
  CHECK_THROWS_AS(common::parallel_for(2,
                                       [](int, int) {
                                         common::parallel_for(2, [](int begin, int) {
                                           if (begin == 1) {
                                             throw common::InputError("inner");
                                           }
                                         });
                                       }),
                  common::InputError);
}

TEST_CASE("parallel_for: tens of thousands of short loops lose nothing") {
  for (const int threads : {2, 4}) {
    const ThreadCount use(threads);
    std::vector<std::int64_t> sums(8, 0);  // plain integers: parallel_for itself must order the accesses
    constexpr int kLoops = 20000;
    for (int loop = 0; loop < kLoops; ++loop) {
      common::parallel_for(8, [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          sums[static_cast<std::size_t>(i)] += loop + i;
        }
      });
    }
    for (int i = 0; i < 8; ++i) {
      CAPTURE(threads, i);
      CHECK(sums[static_cast<std::size_t>(i)] == std::int64_t{kLoops} * (kLoops - 1) / 2 + std::int64_t{kLoops} * i);
    }
  }
}

TEST_CASE("parallel_for: wakes sleeping threads, workers and caller") {
  const ThreadCount use(3);
  std::vector<int> runs(3, 0);
  for (int loop = 0; loop < 60; ++loop) {
    sleep_ms(loop % 3);  // workers give up spinning
    common::parallel_for(3, [&](int begin, int) {
      if (begin == loop % 4) {
        sleep_ms(2);  // the others are done long before; begin 1 and 2 keep the caller waiting
      }
      ++runs[static_cast<std::size_t>(begin)];
    });
  }
  CHECK(runs == std::vector<int>{60, 60, 60});
}

TEST_CASE("parallel_for: calls from several threads take turns") {
  const ThreadCount use(2);
  std::array<std::int64_t, 3> sums = {};
  std::vector<std::thread> callers;
  callers.reserve(sums.size());
  for (std::int64_t& total : sums) {
    callers.emplace_back([&total] {
      for (int loop = 0; loop < 500; ++loop) {
        std::atomic<std::int64_t> sum = 0;
        common::parallel_for(100, [&](int begin, int end) { sum += end - begin; });
        total += sum;
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  CHECK(sums == std::array<std::int64_t, 3>{50000, 50000, 50000});
}

TEST_CASE("set_num_threads: at least one, never inside a loop") {
  const ThreadCount use(2);
  CHECK_THROWS_AS(common::set_num_threads(0), CheckError);
  CHECK_THROWS_AS(common::set_num_threads(-3), CheckError);
  CHECK_THROWS_AS(common::parallel_for(2, [](int, int) { common::set_num_threads(3); }), CheckError);
  CHECK_THROWS_AS(common::parallel_for(1, [](int, int) { common::set_num_threads(3); }), CheckError);
  CHECK_THROWS_AS(common::parallel_for(-1, [](int, int) {}), CheckError);
  CHECK(common::num_threads() == 2);
}

#if defined(__linux__)
TEST_CASE("set_num_threads: n threads are the caller and n - 1 workers") {
  const auto threads_of_process = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const ThreadCount use(1);
  // The system lists a joined thread for a moment longer, and sanitizers have threads of their own. So the test waits
  // until the count is stable, and compares only differences.
  sleep_ms(200);
  const auto alone = threads_of_process();
  common::set_num_threads(4);
  CHECK(threads_of_process() - alone == 3);
  common::set_num_threads(1);
  const double limit = common::now_seconds() + 10.0;
  while (threads_of_process() != alone && common::now_seconds() < limit) {
    sleep_ms(1);
  }
  CHECK(threads_of_process() == alone);
}
#endif
