// Distributions of measured values: one form grows with each value, the other does not.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace common {

// Summarises a set of numbers; an empty set has only zeros, which is not the same as numbers that are 0. median and
// p99: the smallest number that at least 50 % or 99 % of the numbers do not exceed.
struct Spread {
  double mean = 0.0;
  double median = 0.0;
  double p99 = 0.0;
  bool is_empty = true;
};
Spread spread_of(std::vector<double> values);

// Whether a distribution keeps each value, for a run with an end, or only counts the values.
enum class Keep { kCounts, kValues };

class Distribution {
 public:
  // bounds: ascending; for each bound, the values that are at most as large are counted.
  Distribution(Keep keep, std::span<const double> bounds) : keep_(keep), bounds_(bounds), counts_(bounds.size()) {}
  void add(double value);

  std::span<const double> bounds() const { return bounds_; }
  // For each bound, how many values are at most as large, but above the previous bound.
  std::span<const std::int64_t> counts() const { return counts_; }
  std::int64_t count() const { return count_; }  // all values, including those above the last bound
  double sum() const { return sum_; }
  // CheckError unless the values are kept.
  Spread spread() const;

 private:
  Keep keep_;
  std::span<const double> bounds_;
  std::vector<std::int64_t> counts_;
  std::int64_t count_ = 0;
  double sum_ = 0.0;
  std::vector<double> values_;
};

// Mean over time: every value counts for as long as it lasts.
class TimeMean {
 public:
  void add(double value, double seconds) {
    sum_ += value * seconds;
    seconds_ += seconds;
  }
  double value() const { return seconds_ > 0.0 ? sum_ / seconds_ : 0.0; }

 private:
  double sum_ = 0.0;
  double seconds_ = 0.0;
};

}  // namespace common
