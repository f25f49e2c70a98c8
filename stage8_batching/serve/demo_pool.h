// A small pool to try commands on, the same as in `demo --shell`. It has no model: sequences are lengths and letters.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "../kv_cache_manager.h"
#include "common/app/shell.h"

namespace stage8 {

// Adds the commands of `demo --shell` for this manager.
using AddDemoCommands = std::function<void(common::Shell&, KvCacheManager&)>;

class DemoPool {
 public:
  explicit DemoPool(AddDemoCommands add_commands) : add_commands_(std::move(add_commands)) { reset(8, 4); }

  // Runs a line of commands. Returns what they print and the pool after them: {"output": "...", "blocks": {...},
  // "sequences": [...]}.
  std::string run(const std::string& line);
  // An empty pool.
  std::string reset(int num_blocks, int block_size);

 private:
  std::string state(const std::string& output) const;

  AddDemoCommands add_commands_;
  std::mutex mutex_;
  std::unique_ptr<KvCacheManager> manager_;
  std::unique_ptr<common::Shell> shell_;
};

}  // namespace
