// Apart from the kernels, so that nvcc need not read what the host's sampling includes.
#include "common/cuda/model/sampling_parameters.h"

#include "common/base/check.h"
#include "common/math/gumbel.h"
#include "common/math/sampling.h"

namespace common {

SamplingParameters sampling_parameters(const SamplingOptions& options, int sample_index, std::int64_t position) {
  COMMON_CHECK(!needs_host(options), "these options are for the host's sampling");
  return {.noise_key = noise_key(options.seed, sample_index, position),
          .temperature = options.temperature,
          .min_score = min_score(options),
          .top_k = options.top_k,
          .top_p = options.top_p,
          .repetition_penalty = options.repetition_penalty};
}

}  // namespace common
