#include "make_server.h"

#ifdef COURSE_PRODUCTION
#include "../production/speculation/speculating_server.h"
#else
#include "common/base/check.h"
#endif

namespace stage8 {

void add_draft_option(common::Command& command, EngineOptions& options) {
  command.option("--speculate", options.num_speculative_tokens, {0, kMaxDrafts},
                 "max drafts a step: guesses of how a text goes on, looked up in the text itself");
}

#ifdef COURSE_PRODUCTION

int max_drafts() { return kMaxDrafts; }

std::unique_ptr<Server> make_server(Engine& engine, const SchedulerOptions& options, Clock& clock) {
  return make_speculating_server(engine, options, clock);
}

#else

int max_drafts() { return 0; }

std::unique_ptr<Server> make_server(Engine& engine, const SchedulerOptions& options, Clock& clock) {
  if (engine.options().num_speculative_tokens > 0) {
    throw common::InputError("--speculate needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return std::make_unique<Server>(engine, options, clock);
}

#endif

}  // namespace
