#include "make_engine.h"

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "../make_runner.h"
#include "common/app/plan.h"
#include "common/base/check.h"

#ifdef COURSE_PRODUCTION
#include <algorithm>
#include <limits>

#include "../production/host_cache/host_cache_runner.h"
#include "../production/host_cache/host_cache_scheduler.h"
#include "../production/scoring/prompt_scores.h"
#include "../production/scoring/row_scoring.h"
#include "../production/shared_reading/shared_reading.h"
#include "../production/speculation/speculating_engine.h"
#include "../production/windows/hidden_blocks.h"
#include "../production/windows/local_pool_scheduler.h"
#include "../production/windows/window_prompt_scheduler.h"
#include "common/app/notes.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/paged/page_shape.h"
#endif

namespace stage8 {

void add_draft_option(common::Command& command, int& num_drafts) {
  command.option("--speculate", num_drafts, {0, common::kMaxDrafts},
                 "max drafts a step: guesses of how a text goes on, looked up in the text itself");
}

void add_production_options(common::Command& command, ProductionOptions& options) {
  add_draft_option(command, options.num_drafts);
  command.option(
      "--host-cache", [&options](const std::string& text) { options.host_cache_bytes = common::parse_memory(text); },
      "host's memory for cached blocks that the pool evicts, such as 16GiB, 600MiB or 24e9 (default: none)");
  command.flag_off("--no-shared-reading", options.shared_reading,
                   "let each sequence read all of its blocks, also those that several of a step begin with");
}

#ifdef COURSE_PRODUCTION

common::Windows windows() { return common::Windows::kComputed; }

int give_up_hidden_blocks(KvCacheManager& manager, SequenceId sequence, int window) {
  return free_hidden_blocks(manager, sequence, window);
}

int max_drafts() { return common::kMaxDrafts; }

int host_cache_blocks(const common::LlamaConfig& config, const EngineOptions& options, std::int64_t bytes) {
  // The runner has not been made yet. Several GPUs have parts of a block, which add up to one.
  const common::PageShape page{1, config.num_kv_heads, options.block_size, config.head_dim,
                               common::page_type(options.gpu.types)};
  const std::int64_t block_bytes = config.num_layers * page.bytes_per_block();
  if (bytes > 0 && bytes < block_bytes) {
    throw common::InputError("--host-cache: " + common::format_bytes(bytes) + " is less than one block, " +
                             common::format_bytes(block_bytes));
  }
  // Numbers of slots are ints.
  std::int64_t most =
      ((std::numeric_limits<int>::max() - options.num_host_slots) / options.block_size - 1) * block_bytes;
  if (const std::int64_t available = common::available_memory_bytes(); available > 0) {  // else it is unknown
    most = std::min(most, available);
  }
  if (bytes > most) {
    throw common::InputError("--host-cache: " + common::format_bytes(bytes) + " is more than can be used, " +
                             common::format_bytes(most));
  }
  return static_cast<int>(bytes / block_bytes);
}

std::unique_ptr<Runner> make_engine_runner(const common::Llama& model, const EngineOptions& options) {
  const common::LlamaConfig& config = model.config();
  if (!options.num_slots.has_value() || !config.has_both_kinds() || options.gpu.tensor_parallel > 1) {
    return make_runner(model, options);
  }
  const int block_size = options.block_size;
  const int num_blocks = blocks_needed(*options.num_slots, block_size);
  const int num_parts = num_local_parts(config, options, {.num_blocks = num_blocks, .block_size = block_size});
  const std::int64_t num_global = config.num_layers - config.num_windowed_layers();
  const std::int64_t num_all = num_blocks * num_global + num_parts * (config.num_layers - num_global);
  EngineOptions divided = options;
  divided.num_slots = static_cast<int>((num_all + config.num_layers - 1) / config.num_layers) * block_size;
  return make_runner(model, divided);
}

std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, int num_drafts, Clock& clock,
                                    int num_host_cache_blocks) {
  if (num_host_cache_blocks > 0 && !HostCacheScheduler::pays(options.scheduler, runner->cache().block_size)) {
    common::print_note("--host-cache keeps nothing: computing a block again takes less time than moving it");
  }
  const int num_undivided = runner->cache().num_blocks;
  std::unique_ptr<Engine> engine = make_speculating_engine(model, options, std::move(runner), num_drafts, clock,
                                                           std::nullopt, num_host_cache_blocks);
  COMMON_CHECK(engine->cache().num_blocks >= blocks_needed(options.num_slots.value_or(0), options.block_size),
               "a runner that was made to be divided is divided");
  if (const common::WindowPoolFigures windows = window_pool_figures(*engine);
      windows.num_blocks > 0 && !options.num_slots.has_value()) {
    const CacheSize& size = engine->cache();
    const auto slots = [&](std::int64_t num_blocks) { return common::format_count(num_blocks * size.block_size); };
    common::print_note("layers that see " + common::format_count(model.config().window) + " tokens have " +
                       slots(windows.num_blocks) + " slots: " +
                       (size.num_blocks > num_undivided
                            ? "so the others have " + slots(size.num_blocks) + " in the same memory"
                            : "the cache takes " + common::format_bytes(windows.bytes_saved) + " less"));
  }
  return engine;
}

common::HostCacheFigures host_cache_figures(const Engine& engine) {
  const auto* const scheduler = dynamic_cast<const HostCacheScheduler*>(&engine.scheduler());
  if (scheduler == nullptr || !scheduler->has_host_cache()) {
    return {};
  }
  const HostCache& cache = scheduler->host_cache();
  const HostCacheStatistics& statistics = cache.statistics();
  return {cache.num_blocks(),  cache.num_there(), cache.num_used(),    statistics.stored,
          statistics.restored, statistics.hits,   statistics.evictions};
}

common::WindowPoolFigures window_pool_figures(const Engine& engine) {
  const auto* const scheduler = dynamic_cast<const LocalPoolScheduler*>(&engine.scheduler());
  if (scheduler == nullptr) {
    return {};
  }
  const LocalPool& pool = scheduler->local_pool();
  const LocalPoolSize& size = pool.size();
  const common::LlamaConfig& config = engine.model().config();
  const int num_held = scheduler->running().empty() ? 0 : pool.num_held();  // counted when a step is scheduled
  const std::int64_t block_bytes =
      engine.cache().bytes_per_slot / config.num_layers * config.num_windowed_layers() * size.block_size;
  return {size.num_parts, num_held, pool.num_held() + pool.num_cached() - num_held, pool.num_evicted(),
          (size.num_blocks - size.num_parts) * block_bytes};
}

std::optional<common::WindowPromptFigures> window_prompt_figures(const Engine& engine) {
  const auto* const scheduler = dynamic_cast<const WindowPromptScheduler*>(&engine.scheduler());
  return scheduler != nullptr ? std::optional(scheduler->statistics()) : std::nullopt;
}

bool exceeds_cache(const Engine& engine) {
  const auto* const scheduler = dynamic_cast<const WindowPromptScheduler*>(&engine.scheduler());
  return scheduler != nullptr && scheduler->exceeds_pool();
}

std::span<const BlockCopy> host_cache_copies(const Engine& engine) {
  const auto* const scheduler = dynamic_cast<const HostCacheScheduler*>(&engine.scheduler());
  return scheduler == nullptr || !scheduler->has_host_cache() ? std::span<const BlockCopy>()
                                                              : scheduler->host_cache().pending_copies();
}

namespace {

// Null if the runner cannot.
SharedReading* shared_reading(Runner& runner) {
  auto* const outer = dynamic_cast<HostCacheRunner*>(&runner);
  return dynamic_cast<SharedReading*>(outer != nullptr ? &outer->inner() : &runner);
}

}  // namespace

bool share_reading(Runner& runner, bool enabled) {
  SharedReading* const reading = shared_reading(runner);
  if (reading != nullptr) {
    reading->share(enabled);
  }
  return reading != nullptr && reading->can_share();
}

bool shares_all_reading(Engine& engine) {
  const SharedReading* const reading = shared_reading(engine.runner());
  return reading != nullptr && reading->is_enabled() && !engine.runner().is_asynchronous();
}

common::SharedReadingFigures shared_reading_figures(Engine& engine) {
  const SharedReading* const reading = shared_reading(engine.runner());
  return reading != nullptr ? reading->figures() : common::SharedReadingFigures();
}

std::span<const int> shared_blocks(Engine& engine) {
  const SharedReading* const reading = shared_reading(engine.runner());
  return reading != nullptr ? reading->blocks() : std::span<const int>();
}

bool scores_prompts(const Runner& runner) { return dynamic_cast<const RowScoring*>(&runner) != nullptr; }

GenerationRequest in_fewest_steps(GenerationRequest request) {
  if (request.num_samples == 1 && !request.length_penalty.has_value()) {
    request.request = with_scored_prompt(std::move(request.request));
  }
  return request;
}

#else

common::Windows windows() { return common::Windows::kUnknown; }

int give_up_hidden_blocks(KvCacheManager& /*manager*/, SequenceId /*sequence*/, int /*window*/) { return -1; }

int max_drafts() { return 0; }

int host_cache_blocks(const common::LlamaConfig& /*config*/, const EngineOptions& /*options*/, std::int64_t bytes) {
  if (bytes > 0) {
    throw common::InputError("--host-cache needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return 0;
}

std::unique_ptr<Runner> make_engine_runner(const common::Llama& model, const EngineOptions& options) {
  return make_runner(model, options);
}

std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, int num_drafts, Clock& clock,
                                    int num_host_cache_blocks) {
  COMMON_CHECK(num_host_cache_blocks == 0, "this build has no second tier");
  if (num_drafts > 0) {
    throw common::InputError("--speculate needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return std::make_unique<Engine>(model, options, std::move(runner), clock);
}

common::HostCacheFigures host_cache_figures(const Engine& /*engine*/) { return {}; }

common::WindowPoolFigures window_pool_figures(const Engine& /*engine*/) { return {}; }

std::optional<common::WindowPromptFigures> window_prompt_figures(const Engine& /*engine*/) { return std::nullopt; }

bool exceeds_cache(const Engine& /*engine*/) { return false; }

std::span<const BlockCopy> host_cache_copies(const Engine& /*engine*/) { return {}; }

bool share_reading(Runner& /*runner*/, bool /*enabled*/) { return false; }

bool shares_all_reading(Engine& /*engine*/) { return false; }

common::SharedReadingFigures shared_reading_figures(Engine& /*engine*/) { return {}; }

std::span<const int> shared_blocks(Engine& /*engine*/) { return {}; }

bool scores_prompts(const Runner& /*runner*/) { return false; }

GenerationRequest in_fewest_steps(GenerationRequest request) { return request; }

#endif

}  // namespace
