// How tokens are drawn: names, ranges and explanations of these settings, for the command line and for `chat`'s /set.
#pragma once

#include "common/model/generation.h"

namespace common {

// settings: has Command's functions option() for numbers.
template <typename Settings>
void add_drawing_options(Settings& settings, SamplingOptions& sampling) {
  settings.option("--temperature", sampling.temperature, {0.0, 100.0}, "0 always takes the most likely token");
  settings.option("--top-k", sampling.top_k, {0, 1 << 24}, "sample only from the k most likely tokens; 0: from all");
  settings.option("--top-p", sampling.top_p, {0.0, 1.0},
                  "sample only from the most likely tokens that together reach this probability");
  settings.option("--min-p", sampling.min_p, {0.0, 1.0},
                  "sample only from tokens at least this many times as likely as the most likely one");
  settings.option("--repetition-penalty", sampling.repetition_penalty, {0.01, 100.0},
                  "above 1, tokens of the prompt and the reply become less likely");
  settings.option("--seed", sampling.seed, "random seed; prompt i (from 0) is sampled with seed + i");
}

}  // namespace common
