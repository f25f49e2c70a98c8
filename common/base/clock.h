// Tells the time. The real clock measures. The virtual one makes a run the same on every machine: a step takes what a
// simple model of costs says, and waiting takes no time at all.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/base/machine.h"
#include "common/base/platform.h"

namespace common {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual double now() const = 0;                  // seconds since it was made
  virtual void wait_until(double time) = 0;        // or until Ctrl-C is noted
  virtual void step_computed(int num_tokens) = 0;  // called after each forward pass
};

class RealClock : public Clock {
 public:
  double now() const override { return now_seconds() - start_; }
  void wait_until(double time) override {
    constexpr double kSecondsAtOnce = 0.05;
    for (double left = time - now(); left > 0.0 && !NoteInterrupts::is_noted(); left = time - now()) {
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, kSecondsAtOnce)));
    }
  }
  void step_computed(int) override {}

 private:
  double start_ = now_seconds();
};

// The same one for all, which counts from its first use.
inline RealClock& real_clock() {
  static RealClock clock;
  return clock;
}

class VirtualClock : public Clock {
 public:
  // A pass reads all weights, however many tokens it has, and computes each of them.
  explicit VirtualClock(double seconds_per_step = 1e-3, double seconds_per_token = 1e-4)
      : seconds_per_step_(seconds_per_step), seconds_per_token_(seconds_per_token) {}
  double now() const override { return now_; }
  void wait_until(double time) override { now_ = time > now_ ? time : now_; }
  void step_computed(int num_tokens) override { now_ += seconds_per_step_ + seconds_per_token_ * num_tokens; }

 private:
  double seconds_per_step_;
  double seconds_per_token_;
  double now_ = 0.0;
};

}  // namespace common
