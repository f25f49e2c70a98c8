// A step's work as flat arrays: the tokens of many sequences, one after the other and without padding, and everything
// that a forward pass needs to know about them. Built once a step, read by every layer; one copy brings it to a GPU.
//
//   A and B decode, sequence C is prefilled       tokens          a9 | b2 | c4 c5 c6 c7
//                                                 positions        9 |  2 |  4  5  6  7
//                                                 query_starts     0    1    2            6
//                                                 context_lengths 10    3    8
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "attention.h"
#include "common/base/tensor.h"
#include "common/math/sampling.h"
#include "kv_cache_manager.h"

namespace stage8 {

// A token that is not known yet: the previous step draws tokens[index] of this step from row `row` of its logits.
struct PendingToken {
  int index = 0;
  int row = 0;
};

// How the token after a row of logits is drawn.
struct SamplingRow {
  common::SamplingOptions options = {};
  int sample_index = 0;
  std::vector<common::Token> used = {};  // for penalties: the text so far, but for the row's input token
  int prompt_length = 0;                 // how many of these tokens, and then of the input token, are the prompt's
  bool draws_token = true;               // false: the row's logits are the result
};

struct RaggedBatch {
  std::vector<common::Token> tokens;         // [num_tokens]
  std::vector<PendingToken> pending_tokens;  // the tokens that are not known yet
  std::vector<int> positions;                // [num_tokens], each in its own sequence
  std::vector<int> slot_mapping;             // [num_tokens]; -1: K and V are not stored
  std::vector<int> logits_rows;              // the rows whose logits are needed
  std::vector<SamplingRow> sampling_rows;    // by row of logits; empty: the token with the largest logit, if any

  // A GPU computes sequences with one token by another kernel than longer ones, so those come first, unless speed does
  // not matter.
  std::vector<SequenceId> sequences;    // [num_sequences], each at most once
  std::vector<int> query_starts = {0};  // [num_sequences + 1]: where each sequence's tokens begin
  std::vector<int> context_lengths;     // [num_sequences]; the new tokens are included
  std::vector<int> block_tables;        // one after the other: ceil(context_length / block_size) blocks each
  std::vector<int> table_starts = {0};  // [num_sequences + 1]: where each sequence's table begins

  // Adds a sequence's next tokens, all of which are stored: their slots must be reserved. with_logits: the logits after
  // the last one are needed.
  void add(const KvCacheManager& manager, SequenceId sequence, std::span<const common::Token> next, bool with_logits);
  // Fills in the pending tokens. drawn: the tokens of the previous step, by row of its logits.
  void resolve_pending(std::span<const common::Token> drawn);

  std::size_t num_sequences() const { return context_lengths.size(); }
  int num_tokens() const { return query_starts.back(); }
  int num_queries(std::size_t i) const { return query_starts[i + 1] - query_starts[i]; }
  std::span<const common::Token> tokens_of(std::size_t i) const {
    return std::span(tokens).subspan(static_cast<std::size_t>(query_starts[i]),
                                     static_cast<std::size_t>(num_queries(i)));
  }
  bool draws_token(std::size_t row) const { return sampling_rows.empty() || sampling_rows[row].draws_token; }
  std::span<const int> block_table(std::size_t i) const {
    return std::span(block_tables)
        .subspan(static_cast<std::size_t>(table_starts[i]),
                 static_cast<std::size_t>(table_starts[i + 1] - table_starts[i]));
  }
};

// Draws the token after a row of logits, on the host, as its sampling row says. No token may be pending.
common::Token sampled_token(const RaggedBatch& batch, std::size_t row, std::span<const float> logits);

// Causal attention of every sequence's new tokens over that sequence's own past: one loop over the segments of the
// batch. q: [num_tokens, num_heads * head_dim]; returns the same shape.
common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch);

}  // namespace
