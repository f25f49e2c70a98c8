// One allocation fails: of those that count, the one with the number that a test has set. For test programs of which
// one thread allocates at a time; counted_allocations.cpp is one of their sources.
#pragma once

#include <utility>

#include "tests/support/failing_allocations.h"

namespace tests {

extern bool counts_allocations;
extern int allocations_until_failure;  // of those that count; -1: none fails

// While it lives, allocations count, or do not.
class Counting {
 public:
  explicit Counting(bool counts) : before_(std::exchange(counts_allocations, counts)) {}
  ~Counting() { counts_allocations = before_; }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;

 private:
  bool before_;
};

}  // namespace tests
