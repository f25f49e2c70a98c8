// A thread with a GPU of its own; it runs one task after the other.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

namespace stage8 {

class DeviceThread {
 public:
  explicit DeviceThread(int device) : device_(device), thread_([this] { loop(); }) {}
  ~DeviceThread() {
    task_ = nullptr;
    hand_over(kWorking);
    thread_.join();
  }
  DeviceThread(const DeviceThread&) = delete;
  DeviceThread& operator=(const DeviceThread&) = delete;

  // finish() must follow: it waits, and returns the exception that the task has thrown, or null.
  void start(std::function<void()> task) {
    task_ = std::move(task);
    hand_over(kWorking);
  }
  std::exception_ptr finish() {
    wait_while(kWorking);
    return std::exchange(thrown_, nullptr);
  }

 private:
  enum State { kIdle, kWorking };

  void hand_over(State state) {
    state_ = state;
    state_.notify_all();
  }

  // Spins: waking a thread takes as long as enqueuing a step, and the next step usually comes soon.
  void wait_while(State state) const {
    constexpr std::chrono::milliseconds kWatchful(5);
    const auto start = std::chrono::steady_clock::now();
    while (state_ == state && std::chrono::steady_clock::now() - start < kWatchful) {
      std::this_thread::yield();
    }
    state_.wait(state);
  }

  void loop() {
    (void)cudaSetDevice(device_);  // if this fails, every later call fails too
    for (;;) {
      wait_while(kIdle);
      if (!task_) {
        return;
      }
      try {
        task_();
      } catch (...) {
        thrown_ = std::current_exception();
      }
      hand_over(kIdle);
    }
  }

  int device_;
  // The side whose turn it is may touch the next two.
  std::function<void()> task_;
  std::exception_ptr thrown_;
  std::atomic<State> state_ = kIdle;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace
