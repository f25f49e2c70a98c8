// Chooses the server. Only this file knows production/speculation/.
#pragma once

#include <memory>

#include "../engine.h"
#include "../server.h"
#include "common/app/command.h"

namespace stage8 {

// The option --speculate: max drafts of a step, for requests that do not say. `options` must live as long as the
// command.
void add_draft_option(common::Command& command, EngineOptions& options);

// Max drafts of a step that a request may ask for: 0 if this build computes none.
int max_drafts();

// The server of all commands that take --speculate: one that also computes drafts (SPECULATION.md), if this build can.
// Throws InputError if the engine's options ask for drafts that it can't compute. Engine and clock must outlive it.
std::unique_ptr<Server> make_server(Engine& engine, const SchedulerOptions& options, Clock& clock);

}  // namespace
