// Apart from the kernels, so that nvcc need not read what the host's sampling includes.
#include "common/cuda/model/sampling_parameters.h"

#include <algorithm>
#include <limits>

#include "common/math/gumbel.h"
#include "common/math/sampling.h"

namespace common {

SamplingParameters sampling_parameters(const SamplingOptions& options, int sample_index, std::int64_t position) {
  return {.noise_key = noise_key(options.seed, sample_index, position),
          .temperature = options.temperature,
          .min_score = min_score(options),
          .top_k = options.top_k,
          .top_p = options.top_p,
          .repetition_penalty = options.repetition_penalty,
          .presence_penalty = options.presence_penalty,
          .frequency_penalty = options.frequency_penalty};
}

std::vector<SamplingBias> sampling_biases(const SamplingOptions& options, std::int64_t position) {
  std::vector<SamplingBias> result;
  if (position < options.min_length) {
    for (const Token token : options.late_tokens) {
      result.push_back({token, -std::numeric_limits<float>::infinity()});
    }
  }
  for (const TokenBias& entry : options.logit_bias) {
    result.push_back({entry.token, entry.bias});
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const SamplingBias& a, const SamplingBias& b) { return a.token < b.token; });
  return result;
}

}  // namespace common
