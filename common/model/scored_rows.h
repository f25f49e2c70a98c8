// Log-probabilities of tokens that are known already: a prompt's own, from the hidden states of the pass that computes
// the prompt.
#pragma once

#include <memory>
#include <span>

#include "common/base/tensor.h"
#include "common/math/sampling.h"

namespace common {

class Llama;

inline constexpr int kMaxScoredBest = 32;

struct ScoredRow {
  int row = 0;                            // of the hidden states: the token before
  Token token = 0;                        // the token whose log-probability is wanted
  int num_best = 0;                       // at most kMaxScoredBest
  std::shared_ptr<TokenLogprobs> result;  // where it is stored once it is computed
};

// hidden: [num_tokens, hidden_size], of Llama::forward. The logits of all rows would be num_rows * vocab_size numbers:
// they are computed in pieces of a few megabytes, and only what is wanted of them is kept. Throws InputError as
// log_softmax does.
void score_rows(const Llama& model, const Matrix& hidden, std::span<const ScoredRow> rows);

}  // namespace common
