#include "engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"
#include "make_runner.h"

namespace stage8 {
namespace {

// Checks the options before a runner is built from them.
const EngineOptions& checked(const EngineOptions& options) {
  COMMON_CHECK(options.chunk_size > 0, "a chunk has at least one token");
  COMMON_CHECK(options.max_sequences > 0, "a forward pass has at least one sequence");
  return options;
}

}  // namespace

Engine::Engine(const common::Llama& model, const EngineOptions& options)
    : Engine(model, options, make_runner(model, checked(options))) {}

Engine::Engine(const common::Llama& model, const EngineOptions& options, std::unique_ptr<Runner> runner)
    : model_(model),
      options_(checked(options)),
      runner_(std::move(runner)),
      manager_(cache().num_blocks, cache().block_size, hash_block, cache().num_host_blocks) {
  options_.num_slots = options.num_slots.value_or(cache().num_slots());
}

bool Engine::start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt) {
  return manager_.allocate(sequence, tokens, salt, {.use_prefix_cache = options_.prefix_cache});
}

std::optional<common::Matrix> Engine::append(SequenceId sequence, std::span<const common::Token> tokens) {
  std::optional<StepResult> result = compute(sequence, tokens, false);
  return result ? std::optional(std::move(result->logits)) : std::nullopt;
}

std::optional<StepResult> Engine::compute(SequenceId sequence, std::span<const common::Token> tokens,
                                          bool draws_tokens) {
  COMMON_CHECK(!tokens.empty(), "nothing to append");
  if (!manager_.reserve(sequence, static_cast<int>(tokens.size()))) {
    return std::nullopt;
  }
  std::optional<StepResult> result;
  while (!tokens.empty()) {
    const std::size_t chunk = std::min(tokens.size(), static_cast<std::size_t>(options_.chunk_size));
    RaggedBatch batch;
    batch.add(manager_, sequence, tokens.first(chunk), chunk == tokens.size());
    batch.draws_tokens = draws_tokens;
    result = runner_->wait(forward(batch));
    commit(batch);
    tokens = tokens.subspan(chunk);
  }
  return result;
}

int Engine::context_length() const {
  const int models = model_.config().context_length;
  return options_.context_length > 0 ? std::min(options_.context_length, models) : models;
}

std::vector<common::Counter> Engine::counters() const {
  const PrefixStatistics& prefix = manager_.prefix_cache().statistics();
  return {{"forward_passes", static_cast<double>(forward_passes_)},
          {"slots_total", static_cast<double>(*options_.num_slots)},
          {"kv_bytes_per_token", static_cast<double>(cache().bytes_per_slot)},
          {"kv_bytes_read", static_cast<double>(kv_bytes_read_)},
          {"blocks_copied", static_cast<double>(blocks_copied_)},
          {"prefix_lookups", static_cast<double>(prefix.lookups)},
          {"prefix_hits", static_cast<double>(prefix.hits)},
          {"prefix_tokens_saved", static_cast<double>(prefix.tokens_saved)},
          {"prefix_evictions", static_cast<double>(prefix.evictions)}};
}

std::string Engine::rejection(const common::Request& request) const {
  const auto prompt_length = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t length = prompt_length + request.max_new_tokens;
  if (request.prompt.empty()) {
    return "the prompt is empty";
  }
  if (request.max_new_tokens < 1) {
    return "no new tokens are requested";
  }
  if (length > context_length()) {
    const bool is_models = context_length() == model_.config().context_length;
    std::string reason = common::format("a prompt of %lld tokens and %d new ones are more than the %s of %d",
                                        static_cast<long long>(prompt_length), request.max_new_tokens,
                                        is_models ? "model's context" : "--context-length", context_length());
    if (prompt_length < context_length()) {
      reason += common::format("; %lld new ones fit", static_cast<long long>(context_length() - prompt_length));
    }
    return reason;
  }
  return "";
}

StepId Engine::forward(const RaggedBatch& batch) {
  while (!manager_.pending_copies().empty()) {
    const std::span<const BlockCopy> copies = independent_copies(manager_.pending_copies());
    runner_->copy_blocks(copies);
    blocks_copied_ += static_cast<std::int64_t>(copies.size());
    manager_.clear_pending_copies(copies.size());  // later copies may overwrite what these have read
  }

  const StepId step = runner_->enqueue(batch);
  forward_passes_ += 1;
  for (const int length : batch.context_lengths) {
    kv_bytes_read_ += cache().bytes_per_slot * length;
  }
  return step;
}

void Engine::commit(const RaggedBatch& batch) {
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    if (options_.prefix_cache) {
      manager_.commit(batch.sequences[i], batch.tokens_of(i));
    } else {
      manager_.commit(batch.sequences[i], batch.num_queries(i));
    }
  }
}

}  // namespace
