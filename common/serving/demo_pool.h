// A small pool to try commands on, the same as in `demo --shell`. It has no model: sequences are lengths and letters.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "common/app/shell.h"
#include "common/serving/pool_snapshot.h"

namespace common {

// Adds the commands of `demo --shell`, for a new pool of num_blocks blocks. Returns a function that describes the pool:
// the snapshot's owners are its sequences, each with the number of its letter.
using MakeDemoPool = std::function<std::function<PoolSnapshot()>(Shell& shell, int num_blocks, int block_size)>;

class DemoPool {
 public:
  explicit DemoPool(MakeDemoPool make_pool) : make_pool_(std::move(make_pool)) { reset(8, 4); }

  // Runs a line of commands. Returns what they print and the pool after them: {"output": "...", "blocks": {...},
  // "sequences": [...]}.
  std::string run(const std::string& line);
  // An empty pool.
  std::string reset(int num_blocks, int block_size);

 private:
  std::string state(const std::string& output) const;

  MakeDemoPool make_pool_;
  std::mutex mutex_;
  std::unique_ptr<Shell> shell_;
  std::function<PoolSnapshot()> snapshot_;
};

}  // namespace common
