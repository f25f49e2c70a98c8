// The fixed workload that every stage runs: a dozen prompts of mixed length, three of which share a long beginning.
#pragma once

#include <span>
#include <string>

namespace common {

struct WorkloadItem {
  std::string prompt;
  int max_new_tokens = 0;
};

std::span<const WorkloadItem> workload();

}  // namespace common
