#include "common/model/generation.h"

#include "common/base/check.h"

namespace common {

bool is_greedy(const Request& request) { return is_greedy(request.sampling) && request.num_logprobs == 0; }

Token next_token(const Request& request, std::span<const float> logits, Completion& completion, int sample) {
  const auto position = static_cast<std::int64_t>(request.prompt.size() + completion.tokens.size());
  const Token token = common::sample(logits, request.sampling, position, request.sample_index + sample, request.prompt,
                                     completion.tokens);
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
