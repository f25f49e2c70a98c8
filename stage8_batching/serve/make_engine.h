// Chooses the engine. Only this file knows production/speculation/.
#pragma once

#include <memory>

#include "../engine.h"
#include "common/app/command.h"
#include "common/model/llama.h"

namespace stage8 {

// The option --speculate: max drafts of a step, for requests that do not say. num_drafts must live as long as the
// command.
void add_draft_option(common::Command& command, int& num_drafts);

// Max drafts of a step that a request may ask for: 0 if this build computes none.
int max_drafts();

// The engine of all commands that take --speculate: one that also computes drafts (SPECULATION.md), if this build can.
// num_drafts: max drafts of a step for requests that do not say. Throws InputError if num_drafts > 0 and this build
// computes none. Model and clock must outlive the engine.
std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, int num_drafts,
                                    Clock& clock = common::real_clock());

// Whether make_engine() makes an engine of this runner that scores prompts: log-probabilities from the steps that
// compute them.
bool scores_prompts(const Runner& runner);

// The request as such an engine serves it in the fewest steps: a text of which only the log-probabilities are wanted is
// computed as a prompt.
GenerationRequest in_fewest_steps(GenerationRequest request);

}  // namespace
