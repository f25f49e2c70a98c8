#include "common/serving/demo_pool.h"

#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "common/serving/pool_view.h"

namespace common {
namespace {

// What is written to std::cout while it lives, in a string. The commands are those of a program with a terminal; a
// server writes nothing else there.
class CapturedOutput {
 public:
  CapturedOutput() : before_(std::cout.rdbuf(text_.rdbuf())) {}
  ~CapturedOutput() { std::cout.rdbuf(before_); }
  CapturedOutput(const CapturedOutput&) = delete;
  CapturedOutput& operator=(const CapturedOutput&) = delete;
  std::ostream& stream() { return text_; }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::streambuf* before_;
};

}  // namespace

std::string DemoPool::run(const std::string& line) {
  const std::lock_guard lock(mutex_);
  CapturedOutput output;
  std::istringstream input(line);
  shell_->run(input, output.stream(), false);
  return state(output.text());
}

std::string DemoPool::reset(int num_blocks, int block_size) {
  const std::lock_guard lock(mutex_);
  shell_ = std::make_unique<Shell>();
  snapshot_ = make_pool_(*shell_, num_blocks, block_size);
  return state("");
}

std::string DemoPool::state(const std::string& output) const {
  const PoolSnapshot pool = snapshot_();
  nlohmann::ordered_json sequences = nlohmann::ordered_json::array();
  for (const PoolSnapshot::Owner& owner : pool.running) {
    const PoolSnapshot::Sequence& sequence = owner.sequences.front();
    sequences.push_back({{"name", std::string(1, sequence_name(owner.id))},
                         {"id", owner.id},
                         {"length", sequence.length},
                         {"table", sequence.block_table}});
  }
  nlohmann::ordered_json document;
  document["output"] = output;
  document["blocks"] = blocks_json(pool);
  document["sequences"] = std::move(sequences);
  return document.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace common
