#include "make_engine.h"

#include <utility>

#ifdef COURSE_PRODUCTION
#include "../production/scoring/prompt_scores.h"
#include "../production/scoring/row_scoring.h"
#include "../production/speculation/speculating_engine.h"
#else
#include "common/base/check.h"
#endif

namespace stage8 {

void add_draft_option(common::Command& command, int& num_drafts) {
  command.option("--speculate", num_drafts, {0, common::kMaxDrafts},
                 "max drafts a step: guesses of how a text goes on, looked up in the text itself");
}

#ifdef COURSE_PRODUCTION

int max_drafts() { return common::kMaxDrafts; }

std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, int num_drafts, Clock& clock) {
  return make_speculating_engine(model, options, std::move(runner), num_drafts, clock);
}

bool scores_prompts(const Runner& runner) { return dynamic_cast<const RowScoring*>(&runner) != nullptr; }

GenerationRequest in_fewest_steps(GenerationRequest request) {
  if (request.num_samples == 1 && !request.length_penalty.has_value()) {
    request.request = with_scored_prompt(std::move(request.request));
  }
  return request;
}

#else

int max_drafts() { return 0; }

std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, int num_drafts, Clock& clock) {
  if (num_drafts > 0) {
    throw common::InputError("--speculate needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return std::make_unique<Engine>(model, options, std::move(runner), clock);
}

bool scores_prompts(const Runner& /*runner*/) { return false; }

GenerationRequest in_fewest_steps(GenerationRequest request) { return request; }

#endif

}  // namespace
