// The bundled model, and the texts that every stage has to generate with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/default_model.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/support/sanitizers.h"

namespace tests {

// Under sanitizers the full set would take a minute and a half for each stage. Sanitizers look for accesses out of
// bounds, which do not depend on the words of a prompt: a few prompts and one chunk size take every path. The other
// builds check all texts.
inline constexpr std::size_t kMaxPrompts = kSanitized ? 2 : std::numeric_limits<std::size_t>::max();

struct BundledModel {
  common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  common::Llama llama{file};
  common::Tokenizer tokenizer{file};
};

// Loaded once for all test cases.
inline const BundledModel& bundled() {
  static const BundledModel model;
  return model;
}

struct GoldenCase {
  std::string prompt;
  std::vector<common::Token> prompt_tokens;
  std::vector<common::Token> generated_tokens;
  double smallest_margin = 0.0;  // between the best and the second-best logit of any step
};

inline const std::vector<GoldenCase>& golden_cases() {
  static const std::vector<GoldenCase> cases = [] {
    std::ifstream stream(std::string(COMMON_SOURCE_DIR) + "/tests/golden/golden_greedy.json");
    COMMON_CHECK(stream.good(), "tests/golden/golden_greedy.json cannot be read");
    const nlohmann::json document = nlohmann::json::parse(stream);
    std::vector<GoldenCase> result;
    for (const auto& entry : document.at("cases")) {
      const auto margins = entry.at("margins").get<std::vector<double>>();
      result.push_back({entry.at("prompt").get<std::string>(), entry.at("prompt_ids").get<std::vector<common::Token>>(),
                        entry.at("generated_ids").get<std::vector<common::Token>>(),
                        *std::min_element(margins.begin(), margins.end())});
    }
    COMMON_CHECK(result.size() >= 5, "golden cases are missing");
    result.resize(std::min(result.size(), kMaxPrompts));
    return result;
  }();
  return cases;
}

inline common::Request greedy_request(const std::string& prompt, int max_new_tokens) {
  common::Request request;
  request.prompt = bundled().tokenizer.encode_prompt(prompt);
  request.max_new_tokens = max_new_tokens;
  return request;
}

// Empty if equal; otherwise the first step at which they differ, and the text up to there.
inline std::string compare_tokens(const std::vector<common::Token>& actual,
                                  const std::vector<common::Token>& expected) {
  if (actual == expected) {
    return "";
  }
  const auto [left, right] = std::mismatch(actual.begin(), actual.end(), expected.begin(), expected.end());
  const auto spelled = [](const std::vector<common::Token>& tokens, auto position) {
    return position == tokens.end() ? std::string("the end") : common::quote(bundled().tokenizer.decode({{*position}}));
  };
  return common::format("step %td: %s, expected %s, after ", left - actual.begin(), spelled(actual, left).c_str(),
                        spelled(expected, right).c_str()) +
         common::quote(bundled().tokenizer.decode(std::vector<common::Token>(actual.begin(), left)));
}

}  // namespace tests
