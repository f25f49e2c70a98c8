#include "engine.h"

#include <algorithm>
#include <deque>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "make_runner.h"

namespace stage7 {
namespace {

// Checks the options before a runner is built from them.
const EngineOptions& checked(const EngineOptions& options) {
  COMMON_CHECK(options.chunk_size > 0, "a chunk has at least one token");
  return options;
}

}  // namespace

Engine::Engine(const common::Llama& model, const EngineOptions& options)
    : Engine(model, options, make_runner(model, checked(options))) {}

Engine::Engine(const common::Llama& model, const EngineOptions& options, std::unique_ptr<Runner> runner)
    : model_(model),
      options_(checked(options)),
      runner_(std::move(runner)),
      manager_(cache().num_blocks, cache().block_size) {}

std::vector<common::Completion> Engine::run(std::span<const common::Request> requests,
                                            const common::OnToken& on_token) {
  std::vector<common::Completion> completions(requests.size());
  std::deque<Generation> waiting;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    completions[i].error = rejection(requests[i]);
    if (completions[i].error.empty()) {
      waiting.push_back({static_cast<SequenceId>(i), &requests[i], &completions[i], requests[i].prompt});
    }
  }

  std::vector<Generation> batch;
  batch.reserve(waiting.size());  // so that a request with slots always gets its place, and gives them back
  // First come, first served: a request that does not fit holds back those behind it.
  const auto admit_next = [&] {
    if (waiting.empty()) {
      return false;
    }
    const Generation& next = waiting.front();
    if (!start(next.sequence, next.tokens, next.request->cache_salt)) {
      return false;
    }
    batch.push_back(std::move(waiting.front()));
    waiting.pop_front();
    return true;
  };
  try {
    while (!waiting.empty() || !batch.empty()) {
      if (batch.empty()) {  // a static batch: no request joins until all have finished
        while (admit_next()) {
          const bool stepped = step(batch.back(), on_token);  // computes the prompt
          COMMON_CHECK(stepped, "slots that were reserved are missing");
        }
      } else {
        for (std::size_t i = 0; i < batch.size(); ++i) {
          while (i < batch.size() && !step(batch[i], on_token)) {
            // The latest arrival is preempted. It keeps its tokens, and is computed again when there is room.
            waiting.push_front(std::move(batch.back()));
            batch.pop_back();
            manager_.free(waiting.front().sequence);
            preemptions_ += 1;
          }
        }
      }
      COMMON_CHECK(!batch.empty(), "no request runs, and the next one does not fit into what is free");
      end_round(batch);
    }
  } catch (...) {  // on_token may throw
    for (const Generation& generation : batch) {
      manager_.free(generation.sequence);
    }
    throw;
  }
  return completions;
}

bool Engine::start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt) {
  return options_.prefix_cache ? manager_.allocate(sequence, tokens, salt)
                               : manager_.allocate(sequence, static_cast<int>(tokens.size()));
}

std::optional<common::Matrix> Engine::append(SequenceId sequence, std::span<const common::Token> tokens) {
  std::optional<StepResult> result = compute(sequence, tokens, false);
  return result ? std::optional(std::move(result->logits)) : std::nullopt;
}

std::optional<common::Token> Engine::next(SequenceId sequence, std::span<const common::Token> tokens,
                                          const common::Request& request, common::Completion& completion) {
  // The runner finds the largest logit itself: from a GPU, that is one number to fetch instead of all logits.
  const bool is_greedy = common::is_greedy(request);
  const std::optional<StepResult> result = compute(sequence, tokens, is_greedy);
  if (!result.has_value()) {
    return std::nullopt;
  }
  if (is_greedy) {
    return common::drawn_token(result->tokens.front());
  }
  return common::next_token(request, {result->logits.data(), static_cast<std::size_t>(result->logits.cols())},
                            completion);
}

std::optional<StepResult> Engine::compute(SequenceId sequence, std::span<const common::Token> tokens,
                                          bool draws_tokens) {
  COMMON_CHECK(!tokens.empty(), "nothing to append");
  const double start = common::now_seconds();
  if (!manager_.reserve(sequence, static_cast<int>(tokens.size()))) {
    return std::nullopt;
  }
  StepId last;
  for (std::span<const common::Token> rest = tokens; !rest.empty();) {
    const std::size_t chunk = std::min(rest.size(), static_cast<std::size_t>(options_.chunk_size));
    last = forward(sequence, rest.first(chunk), chunk == rest.size(), draws_tokens);
    rest = rest.subspan(chunk);
  }
  StepResult result = runner_->wait(last);
  if (options_.prefix_cache) {
    manager_.publish(sequence, tokens);
  }
  timing_.add(tokens.size(), common::now_seconds() - start);
  return result;
}

std::vector<common::Counter> Engine::counters() const {
  const auto rounds = static_cast<double>(std::max<std::int64_t>(rounds_, 1));
  const PrefixStatistics& prefix = manager_.prefix_cache().statistics();
  return {{"max_requests_at_once", static_cast<double>(max_running_)},
          {"requests_held", static_cast<double>(requests_held_) / rounds},
          {"forward_passes", static_cast<double>(forward_passes_)},
          {"slots_total", static_cast<double>(options_.num_slots)},
          {"slots_reserved", static_cast<double>(slots_reserved_) / rounds},
          {"slots_used", static_cast<double>(slots_used_) / rounds},
          {"kv_bytes_per_token", static_cast<double>(cache().bytes_per_slot)},
          {"kv_bytes_read", static_cast<double>(kv_bytes_read_)},
          {"preemptions", static_cast<double>(preemptions_)},
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
  if (length > model_.config().context_length) {
    return common::format("a prompt of %lld tokens and %d new ones are more than the model's context of %d",
                          static_cast<long long>(prompt_length), request.max_new_tokens,
                          model_.config().context_length);
  }
  const auto needed = static_cast<int>(length);
  if (needed > manager_.usage().total) {
    return common::format("the request needs %d slots, and the whole cache has %d", needed, manager_.usage().total);
  }
  return "";
}

bool Engine::step(Generation& generation, const common::OnToken& on_token) {
  const common::Request& request = *generation.request;
  common::Completion& completion = *generation.completion;
  const auto length = static_cast<std::size_t>(manager_.length(generation.sequence));
  const std::optional<common::Token> drawn =
      next(generation.sequence, std::span<const common::Token>(generation.tokens).subspan(length), request, completion);
  if (!drawn.has_value()) {
    return false;
  }
  const common::Token token = *drawn;
  if (std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end()) {
    completion.finish_reason = common::FinishReason::kStop;
    generation.finished = true;
    return true;
  }
  completion.tokens.push_back(token);
  on_token(generation.sequence, token);
  const bool is_stopped = request.stop_strings.found_after(completion.tokens);
  completion.finish_reason = is_stopped ? common::FinishReason::kStop : common::FinishReason::kLength;
  generation.tokens.push_back(token);
  generation.finished = is_stopped || static_cast<int>(completion.tokens.size()) == request.max_new_tokens;
  return true;
}

void Engine::end_round(std::vector<Generation>& batch) {
  const Usage usage = manager_.usage();
  max_running_ = std::max(max_running_, static_cast<int>(batch.size()));
  rounds_ += 1;
  slots_reserved_ += usage.reserved;
  slots_used_ += usage.used;
  requests_held_ += static_cast<std::int64_t>(batch.size());
  std::erase_if(batch, [&](const Generation& generation) {
    if (generation.finished) {
      manager_.free(generation.sequence);
    }
    return generation.finished;
  });
}

StepId Engine::forward(SequenceId sequence, std::span<const common::Token> chunk, bool is_last, bool draws_tokens) {
  RaggedBatch batch;
  batch.add(manager_, sequence, chunk, is_last);
  batch.draws_tokens = draws_tokens;
  const std::span<const BlockCopy> copies = manager_.pending_copies();
  runner_->copy_blocks(copies);
  blocks_copied_ += static_cast<std::int64_t>(copies.size());
  manager_.clear_pending_copies();

  const StepId step = runner_->enqueue(batch);
  manager_.commit(sequence, batch.num_tokens());
  forward_passes_ += 1;
  kv_bytes_read_ += cache().bytes_per_slot * batch.context_lengths.front();
  return step;
}

}  // namespace
