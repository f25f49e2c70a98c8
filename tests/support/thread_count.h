// The number of threads of the model's arithmetic, for a part of a test.
#pragma once

#include "common/base/parallel.h"

namespace tests {

// Sets the number of threads, and sets it back at the end.
class ThreadCount {
 public:
  explicit ThreadCount(int num_threads) { common::set_num_threads(num_threads); }
  ~ThreadCount() { common::set_num_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;
  ThreadCount(ThreadCount&&) = delete;
  ThreadCount& operator=(ThreadCount&&) = delete;

 private:
  int before_ = common::num_threads();
};

}  // namespace tests
