// Every stage writes the same text. The expected tokens come from an independent program (golden_greedy.json); they
// hold for any correct order of adding floats, because no best and second-best logit come near each other.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/app/workload.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "common/model/generation.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/golden.h"
#include "tests/support/sanitizers.h"

using common::Completion;
using common::FinishReason;
using common::Request;
using common::Token;
using tests::bundled;
using tests::compare_tokens;
using tests::golden_cases;
using tests::GoldenCase;
using tests::greedy_request;
using tests::kMaxPrompts;

namespace {

// The result of a comparison that finds no difference; a failing check then shows its text instead.
const std::string kNoDifference;

struct Run {
  std::vector<Completion> completions;
  std::vector<std::vector<Token>> streamed;  // what on_token was called with, request by request
  std::vector<common::Counter> counters;
};

// Settings that must not change a text.
struct Configuration {
  int chunk_size = 256;  // from stage 8 on: the token budget of a step
  int num_slots = 4096;
  int block_size = 16;  // from stage 2 on
};

// A new engine whose whole cache is NaN.
Run run(const std::vector<Request>& requests, const Configuration& configuration) {
  stage::EngineOptions options = tests::tight_options();
  tests::max_pass_tokens(options) = configuration.chunk_size;
  options.num_slots = configuration.num_slots;
#if STAGE_NUMBER >= 2
  options.block_size = configuration.block_size;
#endif
  stage::Engine engine(bundled().llama, options);
  tests::poison(engine);
  Run result;
  result.streamed.resize(requests.size());
  const common::OnToken on_token = [&](int request, Token token) {
    result.streamed.at(static_cast<std::size_t>(request)).push_back(token);
  };
  tests::EngineRun engine_run = tests::run_requests(engine, requests, on_token);
  result.completions = std::move(engine_run.completions);
  result.counters = std::move(engine_run.counters);
  return result;
}

std::vector<Request> workload_requests() {
  std::vector<Request> requests;
  for (const common::WorkloadItem& item : common::workload()) {
    if (requests.size() < kMaxPrompts) {
      requests.push_back(greedy_request(item.prompt, item.max_new_tokens));
    }
  }
  return requests;
}

// Requests at temperature 0.8, some with top-k or top-p. Their draws are the same in every test and on every machine:
// a few hundred, so that none of them happens to be decided by less than rounding.
std::vector<Request> sampled_requests() {
  std::vector<Request> requests;
  common::Random random(6);
  for (int i = 0; i < 12; ++i) {
    Request request;
    const auto length = static_cast<int>(1 + random.below(40));
    for (int token = 0; token < length; ++token) {
      request.prompt.push_back(
          static_cast<Token>(random.below(static_cast<std::uint64_t>(bundled().llama.config().vocab_size))));
    }
    request.max_new_tokens = static_cast<int>(4 + random.below(20));
    request.sampling = {.temperature = 0.8F,
                        .top_k = i % 3 == 1 ? 40 : 0,
                        .top_p = i % 3 == 2 ? 0.9F : 1.0F,
                        .seed = static_cast<std::uint64_t>(i)};
    requests.push_back(request);
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
    const Run result = run(requests, {.chunk_size = chunk_size});
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
  const Run together = run(requests, {});
  REQUIRE(together.completions.size() == requests.size());
  REQUIRE(common::counter(together.counters, "max_requests_at_once") == static_cast<double>(requests.size()));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Run alone = run({requests[i]}, {});
    CAPTURE(common::workload()[i].prompt);
    CHECK(static_cast<int>(together.completions[i].tokens.size()) == requests[i].max_new_tokens);
    CHECK(compare_tokens(together.completions[i].tokens, alone.completions[0].tokens) == kNoDifference);
    CHECK(together.streamed[i] == together.completions[i].tokens);
  }
}

TEST_CASE("the workload's text does not depend on the chunk size") {
  const std::vector<Request> requests = workload_requests();
  const Run whole = run(requests, {});
  const Run chunked = run(requests, {.chunk_size = 7});
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(common::workload()[i].prompt);
    CHECK(compare_tokens(chunked.completions[i].tokens, whole.completions[i].tokens) == kNoDifference);
  }
}

TEST_CASE("sampled text does not depend on the chunk size, and is the same in all stages") {
  // Drawn by inverting the cumulative distribution, this text would change: chunks of 8 and of 256 tokens give logits
  // that differ by a rounding, and one of the 64 random numbers lies on the boundary between two tokens.
  Request request = greedy_request(
      "garden who bird wood \u201cquoted\u201d mill when bird golden mill said tree took upon who wolf tree golden old "
      "not mother so tree \u00df stone daughter woman dragon mill upon time great rich door and upon queen tree and "
      "once \u00df",
      64);
  request.sampling.temperature = 0.8F;
  request.sampling.seed = 822;
  for (const int chunk_size : {1, 8, 256}) {
    CAPTURE(chunk_size);
    const std::string text =
        bundled().tokenizer.decode(run({request}, {.chunk_size = chunk_size}).completions[0].tokens);
    CHECK(text ==
          " herself in honour of the stranger, and when they were obliged to give her a ship to Prince Ali, Queen "
          "Connlin took her weeping-smark for his lady friend.\nThe Prince was utterly pleased, for he had made up his "
          "mind that");
  }
}

TEST_CASE("sampled text depends neither on chunks, blocks and the cache's size nor on what runs beside it") {
  const std::vector<Request> all = sampled_requests();
  std::vector<std::vector<Token>> alone;
  alone.reserve(all.size());
  for (const Request& request : all) {
    alone.push_back(run({request}, {}).completions[0].tokens);
  }
  common::Random random(7);
  const auto one_of = [&](const std::vector<int>& values) { return values[random.below(values.size())]; };
  const int num_configurations = tests::kSanitized ? 1 : 40;  // in each of the stages
  for (int i = 0; i < num_configurations; ++i) {
    Configuration configuration;
    configuration.chunk_size = one_of({1, 2, 3, 7, 16, 40, 256});
    configuration.block_size = one_of({1, 2, 5, 8, 16, 64});
    configuration.num_slots = one_of({64, 96, 128, 320});  // no request needs more than 64
    const std::size_t first = random.below(all.size());
    const std::size_t count = 1 + random.below(4);
    std::vector<Request> requests;
    for (std::size_t j = 0; j < count; ++j) {
      requests.push_back(all[(first + j) % all.size()]);
    }
    const Run result = run(requests, configuration);
    for (std::size_t j = 0; j < count; ++j) {
      CAPTURE(configuration.chunk_size, configuration.block_size, configuration.num_slots, first, count, j);
      CAPTURE(result.completions[j].error);
      CHECK(compare_tokens(result.completions[j].tokens, alone[(first + j) % all.size()]) == kNoDifference);
    }
  }
}

TEST_CASE("a text ends with the token that completes a stop string, and for that reason, even if it is the last one") {
  // Token i is spelled "<i>".
  const auto decode = [](std::span<const Token> tokens) {
    std::string text;
    for (const Token token : tokens) {
      text += "<" + std::to_string(token) + ">";
    }
    return text;
  };
  constexpr int kStoppedAfter = 5;
  Request request = greedy_request(golden_cases().front().prompt, 16);
  const std::vector<Token> whole = run({request}, {}).completions[0].tokens;
  REQUIRE(whole.size() > kStoppedAfter + 1);
  request.stop_strings =
      common::StopStrings({"absent", decode(std::span(whole).subspan(kStoppedAfter - 2, 2))}, decode);
  for (const int max_new_tokens : {kStoppedAfter - 1, kStoppedAfter, kStoppedAfter + 1}) {
    request.max_new_tokens = max_new_tokens;
    const Completion completion = run({request}, {}).completions[0];
    CAPTURE(max_new_tokens);
    CHECK(static_cast<int>(completion.tokens.size()) == std::min(max_new_tokens, kStoppedAfter));
    CHECK((completion.finish_reason == FinishReason::kStop) == (max_new_tokens >= kStoppedAfter));
  }
}
