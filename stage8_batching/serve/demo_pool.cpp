#include "demo_pool.h"

#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "pool_view.h"

namespace stage8 {

std::string DemoPool::run(const std::string& line) {
  const std::lock_guard lock(mutex_);
  std::istringstream input(line);
  std::ostringstream output;
  shell_->run(input, output, false);
  return state(output.str());
}

std::string DemoPool::reset(int num_blocks, int block_size) {
  const std::lock_guard lock(mutex_);
  manager_ = std::make_unique<KvCacheManager>(num_blocks, block_size);
  shell_ = std::make_unique<common::Shell>();
  add_commands_(*shell_, *manager_);
  return state("");
}

std::string DemoPool::state(const std::string& output) const {
  OwnerOfSequence owners;
  nlohmann::ordered_json sequences = nlohmann::ordered_json::array();
  for (const SequenceId sequence : manager_->sequences()) {
    owners[sequence] = sequence;
    sequences.push_back({{"name", std::string(1, common::sequence_name(sequence))},
                         {"id", sequence},
                         {"length", manager_->length(sequence)},
                         {"table", manager_->block_table(sequence)}});
  }
  nlohmann::ordered_json document;
  document["output"] = output;
  document["blocks"] = nlohmann::ordered_json::parse(blocks_json(*manager_, owners));
  document["sequences"] = std::move(sequences);
  return document.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace
