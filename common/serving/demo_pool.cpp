#include "common/serving/demo_pool.h"

#include <sstream>
#include <utility>

#include "common/base/json.h"

namespace common {

std::string DemoPool::run(const std::string& line) {
  const std::lock_guard lock(mutex_);
  std::istringstream input(line);
  std::ostringstream output;
  shell_->run(input, output, false);
  return state(output.str());
}

std::string DemoPool::reset(int num_blocks, int block_size) {
  const std::lock_guard lock(mutex_);
  shell_ = std::make_unique<Shell>();
  snapshot_ = make_pool_(*shell_, num_blocks, block_size);
  return state("");
}

std::string DemoPool::state(const std::string& output) const {
  const PoolSnapshot pool = snapshot_();
  Json sequences = Json::array();
  for (const PoolSnapshot::Owner& owner : pool.running) {
    const PoolSnapshot::Sequence& sequence = owner.sequences.front();
    sequences.push_back({{"name", std::string(1, sequence_name(owner.id))},
                         {"id", owner.id},
                         {"length", sequence.length},
                         {"table", sequence.block_table}});
  }
  Json document;
  document["output"] = output;
  document["blocks"] = {{"block_size", pool.block_size}, {"total", pool.num_blocks}, {"cached", pool.cached_blocks}};
  document["sequences"] = std::move(sequences);
  return document.dump();
}

}  // namespace common
