#include "batch.h"

#include "common/base/check.h"

namespace stage8 {

void RaggedBatch::add(const KvCacheManager& manager, SequenceId sequence, std::span<const common::Token> next,
                      bool with_logits) {
  COMMON_CHECK(!next.empty(), "a sequence in the batch has at least one token");
  const int first = manager.length(sequence);
  const auto count = static_cast<int>(next.size());
  const int context_length = first + count;
  tokens.insert(tokens.end(), next.begin(), next.end());
  for (int position = first; position < context_length; ++position) {
    positions.push_back(position);
  }
  const std::vector<int> slots = manager.slots(sequence, first, count);
  slot_mapping.insert(slot_mapping.end(), slots.begin(), slots.end());

  sequences.push_back(sequence);
  query_starts.push_back(query_starts.back() + count);
  context_lengths.push_back(context_length);
  // Blocks that are reserved ahead hold no tokens yet.
  const int num_blocks = blocks_needed(context_length, manager.block_size());
  const std::vector<int>& table = manager.block_table(sequence);
  block_tables.insert(block_tables.end(), table.begin(), table.begin() + num_blocks);
  table_starts.push_back(table_starts.back() + num_blocks);
  if (with_logits) {
    logits_rows.push_back(query_starts.back() - 1);
  }
}

void RaggedBatch::resolve_pending(std::span<const common::Token> drawn) {
  for (const PendingToken& pending : pending_tokens) {
    tokens[static_cast<std::size_t>(pending.index)] = drawn[static_cast<std::size_t>(pending.row)];
  }
  pending_tokens.clear();
}

common::Token sampled_token(const RaggedBatch& batch, std::size_t row, std::span<const float> logits) {
  if (batch.sampling_rows.empty()) {
    return common::argmax(logits);
  }
  const SamplingRow& sampling = batch.sampling_rows[row];
  const auto last = static_cast<std::size_t>(batch.logits_rows[row]);
  std::vector<common::Token> text = sampling.used;
  text.push_back(batch.tokens[last]);
  const auto prompt_length = static_cast<std::size_t>(sampling.prompt_length);
  return common::sample(logits, sampling.options, batch.positions[last] + 1, sampling.sample_index,
                        std::span(text).first(prompt_length), std::span(text).subspan(prompt_length));
}

common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch) {
  COMMON_CHECK(q.rows() == batch.num_tokens(), "the batch has one query for each token");
  common::Matrix output(q.rows(), q.cols());
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    const common::Matrix queries = q.middleRows(batch.query_starts[i], batch.num_queries(i));
    output.middleRows(batch.query_starts[i], batch.num_queries(i)) =
        attention(cache, layer, queries, batch.block_table(i), batch.context_lengths[i]);
  }
  return output;
}

}  // namespace
