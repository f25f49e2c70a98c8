// Chooses the engine. Only this file knows production/speculation/, production/host_cache/, production/windows/ and
// production/shared_reading/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "../engine.h"
#include "common/app/command.h"
#include "common/model/llama.h"
#include "common/serving/pool_snapshot.h"

namespace stage8 {

// The option --speculate: max drafts of a step, for requests that do not say. num_drafts must live as long as the
// command.
void add_draft_option(common::Command& command, int& num_drafts);

// What production/ adds to an engine that serves.
struct ProductionOptions {
  int num_drafts = 0;  // as for make_engine()
  // Memory of the host for the prefix cache's second tier (HOST_CACHE.md), in bytes; 0: there is none.
  std::int64_t host_cache_bytes = 0;
  bool shared_reading = true;  // as for share_reading()
};

// The options --speculate, --host-cache and --no-shared-reading. `options` must live as long as the command.
void add_production_options(common::Command& command, ProductionOptions& options);

// How many blocks of the model's K and V the second tier has. Throws InputError if the memory is less than one block,
// or more than there is, or if this build has no second tier.
int host_cache_blocks(const common::LlamaConfig& config, const EngineOptions& options, std::int64_t bytes);

// What this build's runners do with a model that has windows (WINDOWS.md).
common::Windows windows();

// Max drafts of a step that a request may ask for: 0 if this build computes none.
int max_drafts();

// The runner for make_engine(), with the same options. If a number of slots is given and layers with a window get a
// pool of their own (WINDOWS.md), it has no more memory than both pools need: make_engine() divides it.
std::unique_ptr<Runner> make_engine_runner(const common::Llama& model, const EngineOptions& options);

// The engine of all commands that take --speculate: one that also computes drafts (SPECULATION.md), if this build can.
// num_drafts: max drafts of a step for requests that do not say. num_host_cache_blocks: how many of the runner's host
// blocks are the second tier of the prefix cache. Throws InputError if one of them is not 0 and this build has none of
// it. Model and clock must outlive the engine.
std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options,
                                    std::unique_ptr<Runner> runner, int num_drafts, Clock& clock = common::real_clock(),
                                    int num_host_cache_blocks = 0);

// Frees a sequence's blocks in front of the window (WINDOWS.md), in a model whose layers all have it. Returns the block
// that stands in for them; -1 if there is none, as in a build without production/.
int give_up_hidden_blocks(KvCacheManager& manager, SequenceId sequence, int window);

// Of the engine's second tier; zeros without one.
common::HostCacheFigures host_cache_figures(const Engine& engine);
// Of the pool of the engine's layers with a window; zeros if all layers are in one pool.
common::WindowPoolFigures window_pool_figures(const Engine& engine);
// Of the prompts that a window's blocks are enough for; nothing if they need those of their whole text.
std::optional<common::WindowPromptFigures> window_prompt_figures(const Engine& engine);
// Whether one text may be longer than the cache, because only its windows have to fit.
bool exceeds_cache(const Engine& engine);
// The second tier's copies that are carried out before the next step.
std::span<const BlockCopy> host_cache_copies(const Engine& engine);

// Whether the runner reads the blocks that several sequences of a step begin with once (SHARED_READING.md), from the
// next step on: from the start, if it can. Returns whether it can.
bool share_reading(Runner& runner, bool enabled);

// Whether blocks that several sequences of a step begin with are read once, however few they are. On a GPU, only many
// are.
bool shares_all_reading(Engine& engine);
// Of the engine's runner; zeros if it cannot.
common::SharedReadingFigures shared_reading_figures(Engine& engine);
// The blocks that the runner's last step has read once for several sequences.
std::span<const int> shared_blocks(Engine& engine);

// Whether make_engine() makes an engine of this runner that scores prompts: log-probabilities from the steps that
// compute them.
bool scores_prompts(const Runner& runner);

// The request as such an engine serves it in the fewest steps: a text of which only the log-probabilities are wanted is
// computed as a prompt.
GenerationRequest in_fewest_steps(GenerationRequest request);

}  // namespace
