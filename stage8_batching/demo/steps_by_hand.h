// Three requests in six blocks, one row for each step: the command `steps`, which prints the tables of the lesson.
#pragma once

#include <string>

#include "../scheduler.h"
#include "common/app/cli.h"

namespace stage8 {

struct StepsOptions {
  int num_slots = 24;
  int token_budget = 8;
  int max_new_tokens = 8;
  int num_samples = 1;  // of the second request
  Preemption preemption = Preemption::kRecompute;
  bool run_ahead = false;
  std::string stop;  // a text that ends a reply; empty: none
};

common::Command& add_steps_command(common::Program& program, StepsOptions& options);

}  // namespace
