// The command `shared-reading`: the bytes of K and V that are read when sequences of a step read the blocks that they
// begin with together, beside those that they read apart.
#pragma once

#include <string>

#include "../engine.h"
#include "common/app/cli.h"

namespace stage8 {

struct SharedReadingOptions {
  EngineOptions engine = {.num_slots = std::nullopt};
  int num_texts = 8;
  int prefix_tokens = 100;  // what they have in common
  int own_tokens = 16;      // of a prompt, beside it
  int reply_tokens = 32;
  int rounds = 5;
  std::string synthetic;  // as in SpeculateOptions
};

// `options` must live as long as `program`.
common::Command& add_shared_reading_command(common::Program& program, SharedReadingOptions& options);

}  // namespace
