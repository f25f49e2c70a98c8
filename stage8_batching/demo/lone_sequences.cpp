#include "lone_sequences.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace stage8 {

bool LoneSequences::start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt) {
  return engine_.manager().allocate(sequence, tokens, salt, {.use_prefix_cache = engine_.options().prefix_cache});
}

std::optional<common::Matrix> LoneSequences::append(SequenceId sequence, std::span<const common::Token> tokens) {
  COMMON_CHECK(!tokens.empty(), "nothing to append");
  KvCacheManager& manager = engine_.manager();
  if (!manager.reserve(sequence, static_cast<int>(tokens.size()))) {
    return std::nullopt;
  }
  const EngineOptions& options = engine_.options();
  StepResult result;
  while (!tokens.empty()) {
    const std::size_t chunk = std::min(tokens.size(), static_cast<std::size_t>(options.scheduler.token_budget));
    RaggedBatch batch;
    batch.add(manager, sequence, tokens.first(chunk), chunk == tokens.size());
    batch.sampling_rows.assign(batch.logits_rows.size(), {.draws_token = false});
    result = engine_.runner().wait(engine_.forward(batch));
    if (options.prefix_cache) {
      manager.commit(sequence, tokens.first(chunk));
    } else {
      manager.commit(sequence, static_cast<int>(chunk));
    }
    tokens = tokens.subspan(chunk);
  }
  return std::move(result.logits.front());
}

}  // namespace
