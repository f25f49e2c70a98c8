#include "common/model/generation.h"

#include <cstddef>
#include <limits>
#include <vector>

#include "common/base/check.h"

namespace common {

namespace {

// The logits with which no stop token can be drawn.
std::vector<float> without_stop_tokens(std::span<const float> logits, std::span<const Token> stop_tokens) {
  std::vector<float> result(logits.begin(), logits.end());
  for (const Token token : stop_tokens) {
    if (token >= 0 && static_cast<std::size_t>(token) < result.size()) {
      result[static_cast<std::size_t>(token)] = -std::numeric_limits<float>::infinity();
    }
  }
  return result;
}

Token draw(const Request& request, std::span<const float> logits, const Completion& completion, int sample) {
  const std::size_t length = completion.tokens.size();
  if (length < request.forced.size()) {
    return request.forced[length];
  }
  std::vector<float> changed;
  if (static_cast<std::int64_t>(length) < request.min_tokens && !request.stop_tokens.empty()) {
    changed = without_stop_tokens(logits, request.stop_tokens);
    logits = changed;
  }
  const auto position = static_cast<std::int64_t>(request.prompt.size() + length);
  return common::sample(logits, request.sampling, position, request.sample_index + sample, request.prompt,
                        completion.tokens);
}

}  // namespace

bool is_greedy(const Request& request) { return is_greedy(request.sampling) && !needs_logits(request); }

bool needs_logits(const Request& request) {
  return request.num_logprobs > 0 || request.min_tokens > 0 || !request.forced.empty() || needs_host(request.sampling);
}

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
