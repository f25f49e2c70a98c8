// Every stage writes the same text. The expected tokens come from an independent program (golden_greedy.json); they
// hold for any correct order of adding floats, because no best and second-best logit come near each other.
#include "tests/support/catch.h"

#include <algorithm>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "common/app/generation.h"
#include "common/app/report.h"
#include "common/app/workload.h"
#include "tests/support/golden.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

#include STAGE_HEADER(engine.h)
#if STAGE_NUMBER >= 8
#include STAGE_HEADER(server.h)
#endif

using common::Completion;
using common::FinishReason;
using common::Request;
using common::Token;
using tests::bundled;
using tests::compare_tokens;
using tests::golden_cases;
using tests::GoldenCase;
using tests::greedy_request;
using tests::kMostPrompts;

namespace {

// What a comparison returns if there is nothing to say; a failing check then shows the text instead.
const std::string kNoDifference;

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
  const common::OnToken on_token = [&](int request, Token token) {
    result.streamed.at(static_cast<std::size_t>(request)).push_back(token);
  };
#if STAGE_NUMBER < 8
  result.completions = engine.run(requests, on_token);
  result.counters = engine.counters();
#else
  stage::VirtualClock clock;
  stage::Server server(engine, {.token_budget = chunk_size}, clock);
  result.completions = server.run(requests, on_token);
  result.counters = server.counters();
#endif
  return result;
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
