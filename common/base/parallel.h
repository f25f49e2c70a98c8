// A parallel for loop. The process has one pool of threads; the calling thread does a share of the work.
#pragma once

#include <functional>

namespace common {

// How many threads parallel_for uses, including the caller: at least 1. Cannot be set while a parallel_for is running.
// Throws InputError if the system cannot start that many threads.
void set_num_threads(int num_threads);
int num_threads();

// Splits [0, count) into one contiguous range for each thread and calls body(begin, end) for every range that is not
// empty. Returns when all are done, and rethrows the first exception that a body threw. The ranges depend only on count
// and num_threads(). A nested call runs all its ranges on the calling thread.
void parallel_for(int count, const std::function<void(int begin, int end)>& body);

}  // namespace common
