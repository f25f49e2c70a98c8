#include "common/model/generation.h"

#include <cstddef>
#include <cstdint>

#include "common/base/check.h"

namespace common {

namespace {

Token draw(const Request& request, std::span<const float> logits, const Completion& completion, int sample) {
  const std::size_t length = completion.tokens.size();
  if (length < request.forced.size()) {
    return request.forced[length];
  }
  const auto position = static_cast<std::int64_t>(request.prompt.size() + length);
  return common::sample(logits, sampling_options(request), position, request.sample_index + sample, request.prompt,
                        completion.tokens);
}

}  // namespace

bool is_greedy(const Request& request) { return is_greedy(sampling_options(request)) && !needs_logits(request); }

SamplingOptions sampling_options(const Request& request) {
  SamplingOptions options = request.sampling;
  if (request.min_tokens > 0) {
    options.late_tokens = request.stop_tokens;
    options.min_length = static_cast<std::int64_t>(request.prompt.size()) + request.min_tokens;
  }
  return options;
}

bool needs_logits(const Request& request) { return request.num_logprobs > 0 || !request.forced.empty(); }

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kRejected:
      return "rejected";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kFailed:
      break;
  }
  return "failed";
}

Token next_token(const Request& request, std::span<const float> logits, Completion& completion, int sample) {
  const Token token = draw(request, logits, completion, sample);
  if (request.num_logprobs > 0) {
    completion.logprobs.push_back(top_logprobs(logits, token, request.num_logprobs));
  }
  return token;
}

double counter(const std::vector<Counter>& counters, std::string_view name) {
  for (const Counter& entry : counters) {
    if (entry.name == name) {
      return entry.value;
    }
  }
  throw CheckError("no counter " + std::string(name));
}

}  // namespace common
