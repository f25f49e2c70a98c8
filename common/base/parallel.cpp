#include "common/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "common/base/check.h"

namespace common {

namespace {

// A decoding step runs hundreds of short loops one after another. Waking a sleeping thread takes tens of microseconds,
// noticing a changed word takes less than one, so threads spin for this long before they sleep.
constexpr std::chrono::microseconds kSpinTime{100};
constexpr int kLooksPerClockRead = 32;

// The two counters are in separate cache lines, or polling one would slow down writes to the other.
constexpr std::size_t kCacheLine = 64;

// True while this thread runs a body. A parallel_for inside the body then stays on this thread.
thread_local bool inside_parallel_for = false;

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls until done() holds or kSpinTime is over; returns whether it held. With more threads than cores, the thread that
// this one waits for may need this core, so the loop yields each time it reads the clock.
template <typename Done>
bool spin_until(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int look = 0; look < kLooksPerClockRead; ++look) {
      if (done()) {
        return true;
      }
      pause_briefly();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// One parallel_for: the body, its ranges, and the first exception.
class Job {
 public:
  Job(int count, int num_ranges, const std::function<void(int, int)>& body)
      : count_(count), num_ranges_(num_ranges), body_(body) {}

  void run_range(int range) {
    const int begin = boundary(range);
    const int end = boundary(range + 1);
    if (begin == end) {
      return;
    }
    const bool was_inside = inside_parallel_for;
    inside_parallel_for = true;
    try {
      body_(begin, end);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!first_exception_) {
        first_exception_ = std::current_exception();
      }
    }
    inside_parallel_for = was_inside;
  }

  void run_all_ranges() {
    for (int range = 0; range < num_ranges_; ++range) {
      run_range(range);
    }
  }

  void rethrow_if_failed() const {
    if (first_exception_) {
      std::rethrow_exception(first_exception_);
    }
  }

 private:
  // 64 bits: count * range may pass 2^31.
  int boundary(int range) const { return static_cast<int>(std::int64_t{count_} * range / num_ranges_); }

  int count_;
  int num_ranges_;
  const std::function<void(int, int)>& body_;
  std::mutex mutex_;
  std::exception_ptr first_exception_;
};

// The caller publishes a job by incrementing generation_. Every worker runs its range of every job, even an empty one,
// and decrements pending_. Waiting for either counter spins first and then sleeps.
class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads) {
    try {
      for (int range = 1; range < num_threads; ++range) {
        workers_.emplace_back([this, range] { work(range); });
      }
    } catch (const std::system_error& error) {
      stop();
      throw InputError("cannot start " + std::to_string(num_threads) + " threads: " + error.what());
    }
  }
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  void run(Job& job) {
    // Callers from different threads take turns.
    const std::lock_guard lock(callers_);
    job_ = &job;
    pending_.store(num_threads_ - 1, std::memory_order_relaxed);
    publish();
    job.run_range(0);
    wait_for_workers();
  }

 private:
  void publish() {
    generation_.fetch_add(1, std::memory_order_seq_cst);
    generation_.notify_all();  // no system call unless a thread sleeps
  }

  void wait_for_workers() {
    if (spin_until([this] { return pending_.load(std::memory_order_acquire) == 0; })) {
      return;
    }
    int still = pending_.load(std::memory_order_acquire);
    while (still != 0) {
      pending_.wait(still, std::memory_order_acquire);
      still = pending_.load(std::memory_order_acquire);
    }
  }

  void work(int range) {
    std::uint32_t seen = 0;
    while (true) {
      const auto changed = [&] { return generation_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(changed)) {
        generation_.wait(seen, std::memory_order_acquire);
      }
      // No generation is skipped: the next one is published only after this worker has decremented pending_.
      ++seen;
      if (stopping_) {
        return;
      }
      job_->run_range(range);
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        pending_.notify_one();
      }
    }
  }

  void stop() {
    stopping_ = true;
    publish();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }

  // stopping_ and job_ are written before generation_ is incremented and read after its change was seen, which orders
  // the accesses. They share its cache line.
  alignas(kCacheLine) std::atomic<std::uint32_t> generation_{0};
  bool stopping_ = false;
  Job* job_ = nullptr;
  std::mutex callers_;
  int num_threads_;
  alignas(kCacheLine) std::atomic<int> pending_{0};
  std::vector<std::thread> workers_;
};

std::unique_ptr<Pool>& pool() {
  static auto instance = std::make_unique<Pool>(std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  return instance;
}

}  // namespace

void set_num_threads(int num_threads) {
  COMMON_CHECK(num_threads >= 1, "at least one thread is needed");
  COMMON_CHECK(!inside_parallel_for, "the number of threads cannot change while a parallel_for is running");
  if (num_threads != pool()->num_threads()) {
    pool() = std::make_unique<Pool>(num_threads);
  }
}

int num_threads() { return pool()->num_threads(); }

void parallel_for(int count, const std::function<void(int begin, int end)>& body) {
  COMMON_CHECK(count >= 0, "cannot loop a negative number of times");
  Pool& threads = *pool();
  Job job(count, threads.num_threads(), body);
  // The same ranges even on one thread, so that results do not depend on how loops are nested.
  if (inside_parallel_for || count <= 1 || threads.num_threads() == 1) {
    job.run_all_ranges();
  } else {
    threads.run(job);
  }
  job.rethrow_if_failed();
}

}  // namespace common
