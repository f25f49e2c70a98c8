#include "make_engine.h"

#include <utility>

#ifdef COURSE_PRODUCTION
#include "../production/speculation/speculating_engine.h"
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

std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, Clock& clock) {
  return make_speculating_engine(model, options, std::move(runner), clock);
}

#else

int max_drafts() { return 0; }

std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, Clock& clock) {
  if (options.num_speculative_tokens > 0) {
    throw common::InputError("--speculate needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return std::make_unique<Engine>(model, options, std::move(runner), clock);
}

#endif

}  // namespace
