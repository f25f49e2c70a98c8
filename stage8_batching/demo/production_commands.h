// What production/ adds to the program: the commands that show what its parts gain, and models with windows.
#pragma once

#include <utility>
#include <vector>

#include "../engine_options.h"
#include "common/app/cli.h"
#include "shared_reading.h"
#include "speculation.h"

namespace stage8 {

struct ProductionDemos {
  SpeculateOptions speculation;
  SharedReadingOptions sharing;
};

// Adds `speculate` and `shared-reading`, and returns them with the options of their engines, which the caller adds. All
// commands of the program compute a model's windows, if this build can. `options` must live as long as `program`.
std::vector<std::pair<common::Command*, EngineOptions*>> add_production(common::Program& program,
                                                                        ProductionDemos& options);

}  // namespace
