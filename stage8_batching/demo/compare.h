// The command `compare`: the same memory, the same requests, four ways to serve them.
#pragma once

#include <cstdint>
#include <string>

#include "../engine.h"
#include "common/app/cli.h"

namespace stage8 {

struct CompareOptions {
  EngineOptions engine;
  int num_requests = 96;
  int max_length = 0;  // prompt and reply of the longest request; 0: the model's context
  double rate = 0.0;   // requests a second; 0: all at once
  std::uint64_t seed = 0;
  std::string synthetic;
  bool virtual_clock = false;
  std::string plot_path;
};

// `options` must live as long as `program`.
common::Command& add_compare_command(common::Program& program, CompareOptions& options);

}  // namespace
