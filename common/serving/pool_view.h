// The state of the pool as JSON, for the page: blocks with their owners, queue, running batch, counters. Made from the
// real manager and scheduler on the engine's thread, and only while it is watched.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/model/tokenizer.h"
#include "common/serving/engine_thread.h"
#include "common/serving/pool_snapshot.h"

namespace common {

// {"block_size": 4, "total": 8, "owner": [...], "owners": [...], "fill": [...]}: of each block the owner's name (-1:
// free, -2: cached), the number of block tables that contain it, and the number of slots that hold a token. A large
// pool shows its first blocks only.
nlohmann::ordered_json blocks_json(const PoolSnapshot& pool);

class PoolView {
 public:
  // tokenizer: null if the model's tokens are no text. Must outlive the object.
  explicit PoolView(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // On the engine's thread, when something has changed. While steps follow each other, at most 25 states a second are
  // made.
  void update(const EngineNews& news);

  // Any thread. Waits for a state after `version`, at most `timeout`, and returns it. The same version: there is none.
  struct State {
    std::int64_t version = 0;
    std::shared_ptr<const std::string> json;  // null at first
  };
  State wait(std::int64_t version, std::chrono::milliseconds timeout);

  int num_watchers() const { return num_watchers_; }
  // States are made only while a Watcher exists.
  class Watcher {
   public:
    explicit Watcher(PoolView& view) : view_(view) { view_.num_watchers_ += 1; }
    ~Watcher() { view_.num_watchers_ -= 1; }
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

   private:
    PoolView& view_;
  };

 private:
  void note_events(const EngineNews& news);
  std::string to_json(const EngineNews& news) const;

  const Tokenizer* tokenizer_;
  // On the engine's thread.
  std::deque<std::string> events_;  // the latest ones
  std::int64_t num_events_ = 0;
  StepReport report_;
  std::deque<std::pair<double, std::int64_t>> progress_;  // time, tokens written so far
  double made_at_ = 0.0;

  std::atomic<int> num_watchers_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_;
};

}  // namespace common
