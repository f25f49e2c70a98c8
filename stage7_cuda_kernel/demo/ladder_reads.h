// The index arithmetic of the ladder's kernels on ten tokens, computed by the CPU.
#pragma once

#include "common/app/cli.h"

namespace stage7 {

// `layout`: where the keys of each token lie. `ladder`: what the thread blocks of each step of stage 7's ladder walk
// and what their threads read; with --step, in detail. `step` must live as long as `program`.
void add_ladder_commands(common::Program& program, int& step);

}  // namespace
