#include "common/base/machine.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/base/platform.h"

namespace common {

namespace {

// A compiler vector type becomes the widest registers the target has. Adding 64-bit integers takes one cycle, and four
// independent sums keep the load units busy: the loop waits for memory and never for arithmetic.
constexpr std::size_t kVectorBytes = 64;
using Vector [[gnu::vector_size(kVectorBytes)]] = std::uint64_t;
constexpr std::size_t kWordsPerVector = kVectorBytes / sizeof(std::uint64_t);
constexpr std::size_t kSums = 4;
constexpr std::size_t kChunkBytes = kVectorBytes * kSums;

constexpr int kMinPasses = 3;
constexpr std::align_val_t kHugePage{std::size_t{1} << 21};

struct FreeAligned {
  void operator()(Vector* data) const { ::operator delete(data, kHugePage); }
};
using Buffer = std::unique_ptr<Vector[], FreeAligned>;

Buffer allocate(std::size_t bytes) {
  void* data = ::operator new(bytes, kHugePage);
  advise_huge_pages(data, bytes);  // keeps address translation out of the measurement
  return Buffer(static_cast<Vector*>(data));
}

// All words are 1, so their sum is the number of words that were really read.
void fill_with_ones(Vector* begin, Vector* end) {
  const Vector ones = Vector{} + 1;
  std::fill(begin, end, ones);
}

std::uint64_t sum_of_words(const Vector* begin, const Vector* end) {
  Vector sums[kSums] = {};
  for (const Vector* at = begin; at != end; at += kSums) {
    for (std::size_t i = 0; i < kSums; ++i) {
      sums[i] += at[i];
    }
  }
  const Vector sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < kWordsPerVector; ++i) {
    total += sum[i];
  }
  return total;
}

}  // namespace

double measure_read_bandwidth(int num_threads, std::size_t bytes, double seconds) {
  COMMON_CHECK(num_threads >= 1, "at least one thread must read");
  const auto threads = static_cast<std::size_t>(num_threads);
  const std::size_t vectors_per_thread = bytes / threads / kChunkBytes * kSums;
  COMMON_CHECK(vectors_per_thread > 0, "the buffer is too small to be split over the threads");
  const std::size_t bytes_read = vectors_per_thread * threads * kVectorBytes;

  const Buffer buffer = allocate(bytes_read);
  std::vector<std::uint64_t> words_read(threads, 0);
  std::barrier pass_boundary(num_threads);
  std::atomic<bool> again = true;  // the barriers would order it, but a sanitizer need not see into them
  double best_seconds = 0.0;

  // Thread 0 measures the time between the start of all threads and the end of the last one.
  const auto read_part = [&](std::size_t thread) {
    Vector* const begin = buffer.get() + thread * vectors_per_thread;
    Vector* const end = begin + vectors_per_thread;
    fill_with_ones(begin, end);  // by the thread that reads it, so that the pages are on its NUMA node
    const double first_start = now_seconds();
    for (int pass = 1; again; ++pass) {
      pass_boundary.arrive_and_wait();
      const double start = now_seconds();
      const std::uint64_t words = sum_of_words(begin, end);
      pass_boundary.arrive_and_wait();
      words_read[thread] = words;
      if (thread == 0) {
        const double stop = now_seconds();
        best_seconds = pass == 1 ? stop - start : std::min(best_seconds, stop - start);
        again = pass < kMinPasses || stop - first_start < seconds;
      }
      pass_boundary.arrive_and_wait();  // `again` is decided
    }
  };
  {
    std::vector<std::thread> others;
    for (std::size_t thread = 1; thread < threads; ++thread) {
      others.emplace_back(read_part, thread);
    }
    read_part(0);
    for (std::thread& other : others) {
      other.join();
    }
  }

  for (const std::uint64_t words : words_read) {
    COMMON_CHECK(words == vectors_per_thread * kWordsPerVector, "a thread did not read all of its part");
  }
  return static_cast<double>(bytes_read) / best_seconds;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace common
