// Models that draft for the small one (engine_fixtures.h), and a check of their pages.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "common/base/text.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/speculation/draft_model.h)
// clang-format on

namespace tests {

// The small model's weights, with other positions: it agrees about most tokens, not about all.
inline const common::Llama& similar_model() {
  static const common::Llama model = [] {
    common::LlamaConfig config = small_model().config();
    config.rope_freq_base = 3.0F;
    return common::Llama(config, 1);
  }();
  return model;
}

// Of another shape, with other weights: it agrees by chance.
inline const common::Llama& other_model() {
  static const common::Llama model = [] {
    common::LlamaConfig config = small_model().config();
    config.hidden_size = 16;
    config.num_layers = 1;
    config.num_heads = 2;
    config.num_kv_heads = 1;
    config.feed_forward_size = 16;
    return common::Llama(config, 2);
  }();
  return model;
}

// Slots that were not written are NaN: a draft model that reads one fails. The model must outlive the result.
inline std::shared_ptr<stage::DraftModel> make_draft_model(const common::Llama& model,
                                                           stage::EngineOptions options = {}) {
  options.gpu.device = stage::Device::kCpu;
  auto result = std::make_shared<stage::DraftModel>(
      std::shared_ptr<const common::Llama>(std::shared_ptr<void>(), &model), kSmallVocabulary, options);
  poison(result->engine());
  return result;
}

// What holds between steps: no fork is left. Empty if it does.
inline std::string problem_of_pages(stage::DraftModel& drafter, int max_texts) {
  const stage::KvCacheManager& manager = drafter.engine().manager();
  if (drafter.has_failed()) {
    return "the draft model has failed";
  }
  if (const int count = static_cast<int>(manager.sequences().size()); count > max_texts) {
    return common::format("%d sequences of drafts are left, and there are %d texts", count, max_texts);
  }
  const stage::CacheSize& cache = drafter.engine().cache();
  return check_ledger(manager, cache.num_blocks, cache.block_size);
}

// Empty if every block is free or cached.
inline std::string leak_of(stage::DraftModel& drafter) {
  const stage::KvCacheManager& manager = drafter.engine().manager();
  return manager.usage().reserved == 0 && manager.sequences().empty() ? ""
                                                                      : "the draft model still holds blocks at the end";
}

}  // namespace tests
