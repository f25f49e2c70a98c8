// A progress line on stderr for work that takes longer than a second. If stderr is not a terminal that understands
// escape sequences, long work writes a new line from time to time instead.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace common {

// Where a line cannot be redrawn: the time before the first line, and between lines.
struct ProgressPace {
  std::chrono::milliseconds first{10'000};
  std::chrono::milliseconds between{30'000};
};

class Progress {
 public:
  // total <= 0: unknown, so only the count is shown.
  Progress(std::string what, std::int64_t total, ProgressPace pace = {});
  ~Progress();  // erases the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(std::int64_t steps = 1);  // draws at most ten times a second, and not in the first second
  void clear();                          // erases the line, so that other output can follow

 private:
  std::string what_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool redraws_;
  ProgressPace pace_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

}  // namespace common
