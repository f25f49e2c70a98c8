// The option --speculate, and the command `speculate`: what drafts gain, and what more tokens in a step cost.
#pragma once

#include <optional>

#include "../engine.h"
#include "common/app/cli.h"

namespace stage8 {

struct SpeculateOptions {
  EngineOptions engine = {.num_slots = std::nullopt, .num_speculative_tokens = kMaxDrafts};
  int rounds = 9;
};

// `options` must live as long as the command.
void add_speculation_option(common::Command& command, EngineOptions& options);

// `options` must live as long as `program`.
common::Command& add_speculate_command(common::Program& program, SpeculateOptions& options);

}  // namespace
