// The command `speculate`: what drafts gain, and what more tokens in a step cost.
#pragma once

#include <optional>
#include <string>

#include "../engine.h"
#include "../serve/make_engine.h"
#include "common/app/cli.h"

namespace stage8 {

struct SpeculateOptions {
  EngineOptions engine = {.num_slots = std::nullopt};
  int num_drafts = common::kMaxDrafts;  // max drafts of a step
  int rounds = 9;
  std::string synthetic;  // a published model's name, for random weights of its shape; empty: the session's model
  int max_new_tokens = 64;
  std::string prompts;  // a file with prompts of several kinds; empty: the session's prompts
  std::string tokens;   // where these prompts are written as tokens, and nothing is measured; empty: nowhere
};

// `options` must live as long as `program`.
common::Command& add_speculate_command(common::Program& program, SpeculateOptions& options);

}  // namespace
