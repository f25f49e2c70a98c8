#include "common/model/recommended_sampling.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/base/check.h"

namespace common {
namespace {

float recommended(const Gguf& file, const char* key, float fallback) {
  try {
    return static_cast<float>(file.get_float(key, static_cast<double>(fallback)));
  } catch (const InputError&) {  // of another type
    return fallback;
  }
}

SamplingOptions usual_sampling() {
  SamplingOptions usual;
  usual.temperature = 0.7F;
  usual.top_k = 40;
  usual.top_p = 0.95F;
  return usual;
}

}  // namespace

SamplingOptions recommended_sampling(const Gguf& file) {
  const SamplingOptions usual = usual_sampling();
  SamplingOptions result = usual;
  result.temperature = recommended(file, "general.sampling.temp", usual.temperature);
  result.top_p = recommended(file, "general.sampling.top_p", usual.top_p);
  result.min_p = recommended(file, "general.sampling.min_p", usual.min_p);
  result.repetition_penalty = recommended(file, "general.sampling.penalty_repeat", usual.repetition_penalty);
  try {
    constexpr std::int64_t kMax = std::numeric_limits<int>::max();
    const std::int64_t top_k = file.get_int("general.sampling.top_k", usual.top_k);
    result.top_k = static_cast<int>(std::clamp<std::int64_t>(top_k, 0, kMax));  // -1 keeps all tokens
  } catch (const InputError&) {
  }
  return problem_of(result).empty() ? result : usual;
}

SamplingOptions with_recommendations(const SamplingOptions& chosen, const Gguf& file) {
  const SamplingOptions usual = usual_sampling();
  const SamplingOptions recommended = recommended_sampling(file);
  SamplingOptions result = chosen;
  const auto take = [&](auto field) {
    if (chosen.*field == usual.*field) {
      result.*field = recommended.*field;
    }
  };
  take(&SamplingOptions::temperature);
  take(&SamplingOptions::top_k);
  take(&SamplingOptions::top_p);
  take(&SamplingOptions::min_p);
  take(&SamplingOptions::repetition_penalty);
  return result;
}

}  // namespace common
