#include "make_engine.h"

#include <optional>
#include <string>
#include <utility>

#ifdef COURSE_PRODUCTION
#include "../production/host_cache/host_cache_scheduler.h"
#include "../production/scoring/prompt_scores.h"
#include "../production/scoring/row_scoring.h"
#include "../production/speculation/speculating_engine.h"
#include "common/app/notes.h"
#else
#include "common/base/check.h"
#endif

namespace stage8 {

void add_draft_option(common::Command& command, int& num_drafts) {
  command.option("--speculate", num_drafts, {0, common::kMaxDrafts},
                 "max drafts a step: guesses of how a text goes on, looked up in the text itself");
}

void add_host_cache_option(common::Command& command, int& num_slots) {
  command.option("--host-cache", num_slots, {0, 1 << 24},
                 "room in the host's memory for cached blocks that the pool evicts, in tokens");
}

#ifdef COURSE_PRODUCTION

int max_drafts() { return common::kMaxDrafts; }

std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, int num_drafts, Clock& clock,
                                    int num_host_cache_blocks) {
  if (num_host_cache_blocks > 0 && !HostCacheScheduler::pays(options.scheduler, runner->cache().block_size)) {
    common::print_note("--host-cache keeps nothing: computing a block again takes less time than moving it");
  }
  return make_speculating_engine(model, options, std::move(runner), num_drafts, clock, std::nullopt,
                                 num_host_cache_blocks);
}

common::HostCacheFigures host_cache_figures(const Engine& engine) {
  const auto* const scheduler = dynamic_cast<const HostCacheScheduler*>(&engine.scheduler());
  if (scheduler == nullptr) {
    return {};
  }
  const HostCache& cache = scheduler->host_cache();
  const HostCacheStatistics& statistics = cache.statistics();
  return {cache.num_blocks(),  cache.num_used(), statistics.stored,
          statistics.restored, statistics.hits,  statistics.evictions};
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
                                    std::unique_ptr<Runner> runner, int num_drafts, Clock& clock,
                                    int num_host_cache_blocks) {
  if (num_drafts > 0 || num_host_cache_blocks > 0) {
    throw common::InputError(std::string(num_drafts > 0 ? "--speculate" : "--host-cache") +
                             " needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return std::make_unique<Engine>(model, options, std::move(runner), clock);
}

common::HostCacheFigures host_cache_figures(const Engine& /*engine*/) { return {}; }

bool scores_prompts(const Runner& /*runner*/) { return false; }

GenerationRequest in_fewest_steps(GenerationRequest request) { return request; }

#endif

}  // namespace
