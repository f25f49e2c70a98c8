// Chooses the engine. Only this file knows production/speculation/.
#pragma once

#include <memory>

#include "../engine.h"
#include "common/app/command.h"
#include "common/model/llama.h"

namespace stage8 {

// The option --speculate: max drafts of a step, for requests that do not say. `options` must live as long as the
// command.
void add_draft_option(common::Command& command, EngineOptions& options);

// Max drafts of a step that a request may ask for: 0 if this build computes none.
int max_drafts();

// The engine of all commands that take --speculate: one that also computes drafts (SPECULATION.md), if this build can.
// Throws InputError if the options ask for drafts that it can't compute. Model and clock must outlive it.
std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, Clock& clock = common::real_clock());

}  // namespace
