// What tokens and drafts cost with the runner of an engine.
#pragma once

#include "../../engine.h"
#include "token_cost.h"

namespace stage8 {

TokenCost token_cost(Engine& engine);

// What a step of the draft model's engine takes, as a share of one of the engine's. On a CPU, by the bytes of weights
// that each reads. On a GPU, by the times of token_cost.h, and the host has to see each draft before the next one is
// computed: an estimate that has not been measured.
double draft_step_cost(Engine& draft, Engine& engine);

}  // namespace
