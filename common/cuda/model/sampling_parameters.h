// How a row's token is drawn, as the GPU's sampler reads it.
#pragma once

#include <cstdint>
#include <vector>

#include "common/cuda/host_device.h"

namespace common {

struct SamplingOptions;

struct SamplingParameters {
  std::uint64_t noise_key = 0;
  float temperature = 0.0F;  // 0: the token with the largest logit
  float min_score = 0.0F;    // -inf: min_p keeps all tokens
  int top_k = 0;             // 0: all tokens
  float top_p = 1.0F;
  float repetition_penalty = 1.0F;
  float presence_penalty = 0.0F;
  float frequency_penalty = 0.0F;
  int first_used = 0;  // of the row's used tokens, for penalties
  int num_used = 0;
  int prompt_length = 0;  // how many of them are the prompt's, the row's own token included, as the last
  int first_bias = 0;     // of the row's biases
  int num_biases = 0;

  COURSE_HOST_DEVICE bool has_penalties() const {
    return repetition_penalty != 1.0F || presence_penalty != 0.0F || frequency_penalty != 0.0F;
  }
};

// Added to a token's logit. -inf takes its place.
struct SamplingBias {
  int token = 0;
  float bias = 0.0F;
};

SamplingParameters sampling_parameters(const SamplingOptions& options, int sample_index, std::int64_t position);

// The biases of a position, sorted by token: -inf for each late token, and logit_bias. If a token has both, they stand
// in the order in which they apply.
std::vector<SamplingBias> sampling_biases(const SamplingOptions& options, std::int64_t position);

}  // namespace common
