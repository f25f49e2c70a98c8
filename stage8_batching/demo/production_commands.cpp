#include "production_commands.h"

#include "../serve/make_engine.h"

namespace stage8 {

std::vector<std::pair<common::Command*, EngineOptions*>> add_production(common::Program& program,
                                                                        ProductionDemos& options) {
  program.set_windows(windows());
  return {{&add_speculate_command(program, options.speculation), &options.speculation.engine},
          {&add_shared_reading_command(program, options.sharing), &options.sharing.engine}};
}

}  // namespace
