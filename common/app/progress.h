// A progress line on stderr for work that takes longer than a second. Silent unless stderr is a terminal that
// understands escape sequences.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace common {

class Progress {
 public:
  // total <= 0: unknown, so only the count is shown.
  Progress(std::string what, std::int64_t total);
  ~Progress();  // erases the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(std::int64_t steps = 1);  // draws at most ten times a second, and not in the first second
  void clear();                          // erases the line, so that other output can follow

 private:
  std::string what_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool enabled_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

}  // namespace common
