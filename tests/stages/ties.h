// Texts of two engines that add in another order, where only rounding decides between tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/stages/serving_fixtures.h"

namespace tests {

// Tokens whose logits are closer are a tie. A logit of a small model depends on the chunks in which a text is computed
// by a few units of 1e-6.
inline constexpr float kTieMargin = 1e-5F;

// Whether each token of the text is drawn behind those before it if its logit is larger by the margin.
inline bool is_drawn_but_for_ties(stage::Engine& engine, common::Request request,
                                  const std::vector<common::Token>& text, float margin) {
  request.sampling.logit_bias.push_back({0, margin});
  for (const common::Token token : text) {
    request.sampling.logit_bias.back().token = token;
    request.max_new_tokens = static_cast<int>(request.forced.size()) + 1;
    if (run_requests(engine, std::span(&request, 1)).completions.front().tokens.back() != token) {
      return false;
    }
    request.forced.push_back(token);
  }
  return true;
}

// The texts of a beam search without stop tokens, best first, computed from log-probabilities. Of two branches within
// the margin, it prefers the one that becomes an earlier one of these texts.
inline std::vector<std::vector<common::Token>> searched_but_for_ties(
    stage::Engine& engine, common::Request request, const std::vector<std::vector<common::Token>>& texts,
    float margin) {
  struct Branch {
    std::vector<common::Token> tokens;
    double log_probability;
    double rank;
  };
  const int num_tokens = request.max_new_tokens;
  request.num_logprobs = kSmallVocabulary;
  std::vector<Branch> live = {{{}, 0.0, 0.0}};
  for (request.max_new_tokens = 1; request.max_new_tokens <= num_tokens; ++request.max_new_tokens) {
    std::vector<Branch> candidates;
    for (const Branch& parent : live) {
      request.forced = parent.tokens;
      const common::Completion last = run_requests(engine, std::span(&request, 1)).completions.front();
      for (const common::TokenLogprob& next : last.logprobs.back().best) {
        Branch& branch = candidates.emplace_back(parent);
        branch.tokens.push_back(next.token);
        branch.log_probability += next.logprob;
        const auto text = std::find_if(texts.begin(), texts.end(), [&](const std::vector<common::Token>& whole) {
          return whole.size() >= branch.tokens.size() &&
                 std::equal(branch.tokens.begin(), branch.tokens.end(), whole.begin());
        });
        branch.rank = branch.log_probability + static_cast<double>(margin) * static_cast<double>(texts.end() - text);
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Branch& left, const Branch& right) { return left.rank > right.rank; });
    candidates.resize(texts.size());
    live = std::move(candidates);
  }
  std::vector<std::vector<common::Token>> result;
  for (Branch& branch : live) {
    result.push_back(std::move(branch.tokens));
  }
  return result;
}

// Puts a text of the output in the place of the expected one if only rounding decides between them. Requests have no
// stop tokens.
inline void accept_ties(const stage::GenerationRequest& task, const stage::RequestOutput& output,
                        const common::Llama& model, std::vector<common::Completion>& expected,
                        float margin = kTieMargin) {
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  stage::Engine engine(model, options);
  std::vector<std::vector<common::Token>> texts;
  for (const common::Completion& completion : output.completions) {
    texts.push_back(completion.tokens);
  }
  if (task.length_penalty.has_value()) {
    if (texts.size() == expected.size() && searched_but_for_ties(engine, task.request, texts, margin) == texts) {
      for (std::size_t i = 0; i < texts.size(); ++i) {
        expected[i].tokens = texts[i];
      }
    }
    return;
  }
  common::Request sample = task.request;
  for (std::size_t i = 0; i < texts.size(); ++i, ++sample.sample_index) {
    if (texts[i].size() <= expected[i].tokens.size() && is_drawn_but_for_ties(engine, sample, texts[i], margin)) {
      std::copy(texts[i].begin(), texts[i].end(), expected[i].tokens.begin());
    }
  }
}

}  // namespace tests
