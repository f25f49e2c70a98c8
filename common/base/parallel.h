// Threads for the loops that are worth them. One pool for the process; the calling thread takes a share of the work.
#pragma once

#include <functional>

namespace common {

// How many threads parallel_for uses, the caller included; at least 1. Not while a parallel_for is running.
void set_num_threads(int num_threads);
int num_threads();

// Splits [0, count) into one contiguous range a thread and calls body(begin, end) for each non-empty range. Returns
// when all are done; the first exception thrown by a body is rethrown here. Ranges depend on count and num_threads()
// alone. Nested calls run on the calling thread.
void parallel_for(int count, const std::function<void(int begin, int end)>& body);

}  // namespace common
