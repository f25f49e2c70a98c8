// How a model's tokens should be drawn, by its file.
#pragma once

#include "common/math/sampling.h"
#include "common/model/gguf.h"

namespace common {

// For conversations, and for requests that do not say: temperature 0.7, top_k 40, top_p 0.95. For these, min_p and the
// repetition penalty, the file's recommendations take precedence (general.sampling.temp, .top_k, .top_p, .min_p,
// .penalty_repeat, as llama.cpp writes them). A recommendation that makes no sense is ignored.
SamplingOptions recommended_sampling(const Gguf& file);

// `chosen`, in which every option that still has its default value gets the file's recommendation.
SamplingOptions with_recommendations(const SamplingOptions& chosen, const Gguf& file);

}  // namespace common
