// A request as clients make it and as an engine serves it, and its result: one type each, from the socket to the
// engine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/model/generation.h"

namespace common {

// What the counters count of a request: its prompt and its texts. For a prompt's log-probabilities, a request's reply
// is forced to be the prompt. It counts as the prompt alone, or as nothing beside the request that has the texts.
enum class Counted { kTexts, kPrompt, kNothing };

// A request for one text, for several texts drawn from one prompt, or for the most probable ones.
struct GenerationRequest {
  Request request;
  int num_samples = 1;
  // If given, the texts are the hypotheses of a beam search that is num_samples wide, compared by log-probability /
  // length ^ length_penalty.
  std::optional<double> length_penalty = std::nullopt;
  Counted counted = Counted::kTexts;
};

// The result of a request, or what there is of it so far. Times are in seconds of the engine's clock.
struct RequestResult {
  // One for each sample, from its first token on; for a beam search its hypotheses, best first, once it is complete.
  std::vector<Completion> completions;
  std::optional<FinishReason> finish_reason;  // set when it ends
  std::string error;                          // why it was rejected or has failed
  int prompt_tokens = 0;
  int cached_tokens = 0;  // of the prompt, found in the prefix cache when it was first admitted
  double arrival = 0.0;
  double admission = -1.0;          // when it was first admitted; negative: never
  std::vector<double> token_times;  // when the first sample's tokens arrived
  double end = 0.0;
};

}  // namespace common
