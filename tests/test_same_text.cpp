// Every stage writes the same text. The expected tokens come from an independent program (golden_greedy.json); they
// hold for any correct order of adding floats, because no best and second-best logit come near each other.
#include "tests/catch.h"

#include <algorithm>
#include <fstream>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/default_model.h"
#include "common/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "common/report.h"
#include "common/workload.h"
#include "tests/sanitizers.h"
#include "tests/stage_api.h"

#include STAGE_HEADER(engine.h)

using common::Completion;
using common::FinishReason;
using common::Request;
using common::Token;

namespace {

// Under sanitizers the full set would take a minute and a half a stage. They look for accesses out of bounds, and those
// do not depend on which words a prompt has: a few prompts and one size of chunk take every path. What the text is, the
// other builds check in full.
constexpr std::size_t kMostPrompts = tests::kSanitized ? 2 : std::numeric_limits<std::size_t>::max();

// What a comparison returns if there is nothing to say; a failing check then shows the text instead.
const std::string kNoDifference;

struct BundledModel {
  common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  common::Llama llama{file};
  common::Tokenizer tokenizer{file};
};

// Loaded once for all test cases.
const BundledModel& bundled() {
  static const BundledModel model;
  return model;
}

struct GoldenCase {
  std::string prompt;
  std::vector<Token> prompt_tokens;
  std::vector<Token> generated_tokens;
  double smallest_margin = 0.0;  // between the best and the second-best logit of any step
};

const std::vector<GoldenCase>& golden_cases() {
  static const std::vector<GoldenCase> cases = [] {
    std::ifstream stream(std::string(COMMON_SOURCE_DIR) + "/tests/golden_greedy.json");
    COMMON_CHECK(stream.good(), "tests/golden_greedy.json cannot be read");
    const nlohmann::json document = nlohmann::json::parse(stream);
    std::vector<GoldenCase> result;
    for (const auto& entry : document.at("cases")) {
      const auto margins = entry.at("margins").get<std::vector<double>>();
      result.push_back({entry.at("prompt").get<std::string>(), entry.at("prompt_ids").get<std::vector<Token>>(),
                        entry.at("generated_ids").get<std::vector<Token>>(),
                        *std::min_element(margins.begin(), margins.end())});
    }
    COMMON_CHECK(result.size() >= 5, "golden cases are missing");
    result.resize(std::min(result.size(), kMostPrompts));
    return result;
  }();
  return cases;
}

struct Run {
  std::vector<Completion> completions;
  std::vector<std::vector<Token>> streamed;  // what on_token was called with, request by request
  std::vector<common::Counter> counters;
};

// A new engine whose whole cache is NaN.
Run run(const std::vector<Request>& requests, int chunk_size) {
  stage::EngineOptions options;
  options.chunk_size = chunk_size;
  stage::Engine engine(bundled().llama, options);
  engine.cache().fill(std::numeric_limits<float>::quiet_NaN());
  Run result;
  result.streamed.resize(requests.size());
  result.completions = engine.run(requests, [&](int request, Token token) {
    result.streamed.at(static_cast<std::size_t>(request)).push_back(token);
  });
  result.counters = engine.counters();
  return result;
}

Request greedy_request(const std::string& prompt, int max_new_tokens) {
  Request request;
  request.prompt = bundled().tokenizer.encode_prompt(prompt);
  request.max_new_tokens = max_new_tokens;
  return request;
}

std::vector<Request> workload_requests() {
  std::vector<Request> requests;
  for (const common::WorkloadItem& item : common::workload()) {
    if (requests.size() < kMostPrompts) {
      requests.push_back(greedy_request(item.prompt, item.max_new_tokens));
    }
  }
  return requests;
}

// Empty if equal; otherwise the first step at which they part, and what was written up to there.
std::string compare_tokens(const std::vector<Token>& actual, const std::vector<Token>& expected) {
  if (actual == expected) {
    return "";
  }
  const auto [left, right] = std::mismatch(actual.begin(), actual.end(), expected.begin(), expected.end());
  const auto spelled = [](const std::vector<Token>& tokens, auto position) {
    return position == tokens.end() ? std::string("the end") : common::quote(bundled().tokenizer.decode({{*position}}));
  };
  return common::format("step %td: %s, expected %s, after ", left - actual.begin(), spelled(actual, left).c_str(),
                        spelled(expected, right).c_str()) +
         common::quote(bundled().tokenizer.decode(std::vector<Token>(actual.begin(), left)));
}

}  // namespace

TEST_CASE("the golden margins are far above rounding") {
  double smallest = std::numeric_limits<double>::infinity();
  for (const GoldenCase& golden : golden_cases()) {
    smallest = std::min(smallest, golden.smallest_margin);
  }
  std::cout << common::format("golden prompts: smallest margin between the two best logits %.4f\n", smallest);
  // float32 keeps seven digits, so a rounding moves a logit of size 10 by less than 1e-5.
  CHECK(smallest > 0.01);
}

TEST_CASE("prompts become the golden tokens") {
  for (const GoldenCase& golden : golden_cases()) {
    CAPTURE(golden.prompt);
    CHECK(bundled().tokenizer.encode_prompt(golden.prompt) == golden.prompt_tokens);
  }
}

TEST_CASE("greedy text is the golden text, in chunks of any size") {
  const std::vector<int> chunk_sizes = tests::kSanitized ? std::vector<int>{3} : std::vector<int>{1, 3, 256};
  for (const int chunk_size : chunk_sizes) {
    std::vector<Request> requests;
    for (const GoldenCase& golden : golden_cases()) {
      REQUIRE(golden.generated_tokens.size() == 64);
      requests.push_back(greedy_request(golden.prompt, 64));
    }
    const Run result = run(requests, chunk_size);
    REQUIRE(result.completions.size() == requests.size());
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Completion& completion = result.completions[i];
      CAPTURE(chunk_size, golden_cases()[i].prompt, completion.error);
      CHECK(completion.finish_reason == FinishReason::kLength);
      CHECK(compare_tokens(completion.tokens, golden_cases()[i].generated_tokens) == kNoDifference);
      CHECK(result.streamed[i] == completion.tokens);
    }
  }
}

TEST_CASE("each prompt of the workload gets the same text alone as beside the others") {
  const std::vector<Request> requests = workload_requests();
  const Run together = run(requests, 256);
  REQUIRE(together.completions.size() == requests.size());
  REQUIRE(common::counter(together.counters, "most_requests_at_once") == static_cast<double>(requests.size()));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Run alone = run({requests[i]}, 256);
    CAPTURE(common::workload()[i].prompt);
    CHECK(static_cast<int>(together.completions[i].tokens.size()) == requests[i].max_new_tokens);
    CHECK(compare_tokens(together.completions[i].tokens, alone.completions[0].tokens) == kNoDifference);
    CHECK(together.streamed[i] == together.completions[i].tokens);
  }
}

TEST_CASE("the workload's text does not depend on the chunk size") {
  const std::vector<Request> requests = workload_requests();
  const Run whole = run(requests, 256);
  const Run chunked = run(requests, 7);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(common::workload()[i].prompt);
    CHECK(compare_tokens(chunked.completions[i].tokens, whole.completions[i].tokens) == kNoDifference);
  }
}
