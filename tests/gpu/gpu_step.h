// A cache and a step for stage 8's runner, built array by array, without a manager.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "tests/support/golden.h"
#include "tests/support/stage_api.h"

#include STAGE_HEADER(batch.h)
#include STAGE_HEADER(kv_cache.h)

namespace tests {

// The shape of the bundled model's cache, in blocks of 16.
inline stage::KvCacheShape shape_of(int num_blocks) {
  const common::LlamaConfig& config = bundled().llama.config();
  return {.num_layers = config.num_layers,
          .num_blocks = num_blocks,
          .block_size = 16,
          .num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_dim = config.head_dim};
}

inline stage::RaggedBatch make_step(std::span<const common::Token> tokens,
                                    std::vector<stage::PendingToken> pending_tokens, std::span<const int> positions,
                                    std::span<const int> slot_mapping, std::vector<int> query_starts,
                                    std::vector<int> context_lengths, std::span<const int> block_tables,
                                    std::vector<int> table_starts, std::vector<int> logits_rows) {
  stage::RaggedBatch step;
  step.tokens.assign(tokens.begin(), tokens.end());
  step.pending_tokens = std::move(pending_tokens);
  step.positions.assign(positions.begin(), positions.end());
  step.slot_mapping.assign(slot_mapping.begin(), slot_mapping.end());
  step.query_starts = std::move(query_starts);
  step.context_lengths = std::move(context_lengths);
  step.block_tables.assign(block_tables.begin(), block_tables.end());
  step.table_starts = std::move(table_starts);
  step.logits_rows = std::move(logits_rows);
  return step;
}

}  // namespace tests
