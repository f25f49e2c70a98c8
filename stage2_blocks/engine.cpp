#include "engine.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"

namespace stage2 {
namespace {

KvCacheShape cache_shape(const common::LlamaConfig& config, const EngineOptions& options) {
  KvCacheShape shape;
  shape.num_layers = config.num_layers;
  shape.num_blocks = blocks_needed(options.num_slots, options.block_size);
  shape.block_size = options.block_size;
  shape.num_heads = config.num_heads;
  shape.num_kv_heads = config.num_kv_heads;
  shape.head_dim = config.head_dim;
  return shape;
}

}  // namespace

Engine::Engine(const common::Llama& model, const EngineOptions& options)
    : model_(model),
      options_(options),
      cache_(cache_shape(model.config(), options)),
      manager_(cache_.shape().num_blocks, cache_.shape().block_size) {
  COMMON_CHECK(options.chunk_size > 0, "a chunk has at least one token");
}

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
    if (!manager_.allocate(next.sequence, static_cast<int>(next.tokens.size()))) {
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

std::optional<common::Matrix> Engine::append(SequenceId sequence, std::span<const common::Token> tokens) {
  COMMON_CHECK(!tokens.empty(), "nothing to append");
  const double start = common::now_seconds();
  const std::size_t num_tokens = tokens.size();
  if (!manager_.reserve(sequence, static_cast<int>(num_tokens))) {
    return std::nullopt;
  }
  common::Matrix hidden;
  while (!tokens.empty()) {
    const std::size_t chunk = std::min(tokens.size(), static_cast<std::size_t>(options_.chunk_size));
    hidden = forward(sequence, tokens.first(chunk));
    tokens = tokens.subspan(chunk);
  }
  common::Matrix logits = model_.logits(hidden.bottomRows(1));
  timing_.add(num_tokens, common::now_seconds() - start);
  return logits;
}

std::vector<common::Counter> Engine::counters() const {
  const auto rounds = static_cast<double>(std::max<std::int64_t>(rounds_, 1));
  return {{"max_requests_at_once", static_cast<double>(max_running_)},
          {"requests_held", static_cast<double>(requests_held_) / rounds},
          {"forward_passes", static_cast<double>(forward_passes_)},
          {"slots_total", static_cast<double>(options_.num_slots)},
          {"slots_reserved", static_cast<double>(slots_reserved_) / rounds},
          {"slots_used", static_cast<double>(slots_used_) / rounds},
          {"kv_bytes_per_token", static_cast<double>(cache_.shape().bytes_per_slot())},
          {"kv_bytes_read", static_cast<double>(kv_bytes_read_)},
          {"kv_bytes_copied", static_cast<double>(kv_bytes_copied_)},
          {"preemptions", static_cast<double>(preemptions_)}};
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
  const std::optional<common::Matrix> logits =
      append(generation.sequence, std::span<const common::Token>(generation.tokens).subspan(length));
  if (!logits.has_value()) {
    return false;
  }
  const common::Token token =
      common::next_token(request, {logits->data(), static_cast<std::size_t>(logits->cols())}, completion);
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

common::Matrix Engine::forward(SequenceId sequence, std::span<const common::Token> tokens) {
  const auto num_tokens = static_cast<int>(tokens.size());
  const int length = manager_.length(sequence);
  const std::vector<int> slot_mapping = manager_.slots(sequence, length, num_tokens);
  std::vector<int> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), length);

  common::Matrix hidden = model_.forward(
      tokens, positions, [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
        cache_.write(layer, slot_mapping, k, v);
        return attention(cache_, layer, q, manager_.block_table(sequence), length + num_tokens);
      });
  forward_passes_ += 1;
  kv_bytes_read_ += cache_.shape().bytes_per_slot() * (length + num_tokens);
  kv_bytes_copied_ += cache_.shape().bytes_per_slot() * (length + num_tokens);
  manager_.commit(sequence, num_tokens);
  return hidden;
}

}  // namespace
