// What is wanted of logits whose next token is known (common/model/scored_rows.h), found on the GPU, so that no logits
// are fetched.
#pragma once

#include <cuda_runtime_api.h>

namespace common {

struct RowScore {
  static constexpr int kMaxBest = 32;

  float logprob = 0.0F;
  int rank = 0;  // 0: a logit is NaN or +inf, or all are -inf
  int best_tokens[kMaxBest] = {};
  float best_logprobs[kMaxBest] = {};
};

// Device pointers. logits: [num_rows, vocab_size]; tokens, num_best and scores: [num_rows]. num_best: at most
// RowScore::kMaxBest, and at most vocab_size.
void score_logits(const float* logits, int vocab_size, int num_rows, const int* tokens, const int* num_best,
                  RowScore* scores, cudaStream_t stream);

}  // namespace common
