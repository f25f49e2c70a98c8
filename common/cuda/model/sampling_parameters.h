// How a row's token is drawn, as the GPU's sampler reads it.
#pragma once

#include <cstdint>

namespace common {

struct SamplingOptions;

struct SamplingParameters {
  std::uint64_t noise_key = 0;
  float temperature = 0.0F;  // 0: the token with the largest logit
  float min_score = 0.0F;    // -inf: min_p keeps all tokens
  int top_k = 0;             // 0: all tokens
  float top_p = 1.0F;
  float repetition_penalty = 1.0F;
  int first_used = 0;  // of the row's used tokens, for the repetition penalty
  int num_used = 0;
};

SamplingParameters sampling_parameters(const SamplingOptions& options, int sample_index, std::int64_t position);

}  // namespace common
