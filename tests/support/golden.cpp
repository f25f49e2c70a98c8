#include "tests/support/golden.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/base/check.h"
#include "common/base/text.h"
#include "tests/support/paths.h"

namespace tests {

const BundledModel& bundled() {
  static const BundledModel model;
  return model;
}

const std::vector<GoldenCase>& golden_cases() {
  static const std::vector<GoldenCase> cases = [] {
    std::ifstream stream(source_path("tests/golden/golden_greedy.json"));
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

common::Request greedy_request(const std::string& prompt, int max_new_tokens) {
  common::Request request;
  request.prompt = bundled().tokenizer.encode_prompt(prompt);
  request.max_new_tokens = max_new_tokens;
  return request;
}

std::string compare_tokens(const std::vector<common::Token>& actual, const std::vector<common::Token>& expected) {
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
