// One step's work as flat arrays: the tokens of many sequences one after the other, without padding, and for each of
// them all that a forward pass needs to know. Built once a step, read by every layer.
//
//   sequence A is prefilled, B and C decode       tokens          a4 a5 a6 a7 | b9 | c2
//                                                 positions        4  5  6  7 |  9 |  2
//                                                 query_starts     0            4    5    6
//                                                 context_lengths  8            10   3
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "attention.h"
#include "common/base/tensor.h"
#include "kv_cache_manager.h"

namespace stage8 {

// A token that is not known yet: tokens[index] of this step is what the step before draws for row `row` of its logits.
struct PendingToken {
  int index = 0;
  int row = 0;
};

struct RaggedBatch {
  std::vector<common::Token> tokens;         // [num_tokens]
  std::vector<PendingToken> pending_tokens;  // those that are not known yet
  std::vector<int> positions;                // [num_tokens], each in its own sequence
  std::vector<int> slot_mapping;             // [num_tokens]
  std::vector<int> logits_rows;              // of the tokens whose logits are wanted, ascending

  std::vector<SequenceId> sequences;    // [num_sequences], each at most once
  std::vector<int> query_starts = {0};  // [num_sequences + 1]: where each one's tokens begin
  std::vector<int> context_lengths;     // [num_sequences], the new tokens included
  std::vector<int> block_tables;        // one after the other: ceil(context_length / block_size) blocks each
  std::vector<int> table_starts = {0};  // [num_sequences + 1]: where each one's table begins

  // Called in every layer, before its attention on the CPU.
  std::function<void(int layer)> on_layer = nullptr;

  // The sequence's next tokens, for which slots are reserved. with_logits: those after the last of them are wanted.
  void add(const KvCacheManager& manager, SequenceId sequence, std::span<const common::Token> next, bool with_logits);
  // Puts in the pending tokens. drawn: by row of the logits of the step before.
  void resolve_pending(std::span<const common::Token> drawn);

  std::size_t num_sequences() const { return sequences.size(); }
  int num_tokens() const { return query_starts.back(); }
  int num_queries(std::size_t i) const { return query_starts[i + 1] - query_starts[i]; }
  std::span<const common::Token> tokens_of(std::size_t i) const {
    return std::span(tokens).subspan(static_cast<std::size_t>(query_starts[i]),
                                     static_cast<std::size_t>(num_queries(i)));
  }
  std::span<const int> block_table(std::size_t i) const {
    return std::span(block_tables)
        .subspan(static_cast<std::size_t>(table_starts[i]),
                 static_cast<std::size_t>(table_starts[i + 1] - table_starts[i]));
  }
};

// Causal attention of every sequence's new tokens over that sequence's own past: one loop over the segments of the
// batch. q: [num_tokens, num_heads * head_dim]; returns the same shape.
common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                         SoftmaxMode mode);

// Each row as a matrix of its own: [1, cols].
std::vector<common::Matrix> split_rows(const common::Matrix& rows);

}  // namespace
