// Stage 1's engine and its static batches.
#include "tests/support/catch.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/tensor.h"
#include "common/model/generation.h"
#include "stage1/engine.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage1_ledger.h"
#include "tests/support/compare.h"

using common::CheckError;
using common::Completion;
using common::FinishReason;
using common::Matrix;
using common::Request;
using common::Token;
using tests::contains;
using tests::describe;
using tests::kSmallContext;
using tests::make_request;
using tests::small_model;

namespace {

const std::string kNoProblem;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

stage1::EngineOptions make_options(int num_slots, int chunk_size = 256) {
  stage1::EngineOptions options;
  options.num_slots = num_slots;
  options.chunk_size = chunk_size;
  return options;
}

struct Run {
  std::vector<Completion> completions;
  std::vector<int> order;  // the request that each token belongs to, in the order in which they were drawn
  std::vector<std::vector<Token>> streamed;
  std::vector<common::Counter> counters;
  common::Timing timing;
  stage1::Usage usage;  // afterwards

  double counter(const char* name) const { return common::counter(counters, name); }
};

// A new engine with a cache full of NaN.
Run run(const std::vector<Request>& requests, const stage1::EngineOptions& options) {
  stage1::Engine engine(small_model(), options);
  engine.cache().fill(kNaN);
  Run result;
  result.streamed.resize(requests.size());
  result.completions = engine.run(requests, [&](int request, Token token) {
    result.order.push_back(request);
    result.streamed.at(static_cast<std::size_t>(request)).push_back(token);
  });
  result.counters = engine.counters();
  result.timing = engine.timing();
  result.usage = engine.manager().usage();
  return result;
}

// The request's text in an engine of its own.
std::vector<Token> tokens_alone(const Request& request) {
  return run({request}, make_options(4096)).completions[0].tokens;
}

}  // namespace

TEST_CASE("engine: what can never be served is rejected with the reason, and the others are served") {
  const std::vector<Request> requests = {make_request(4, 5),  make_request(0, 5),   make_request(4, 0),
                                         make_request(4, -1), make_request(30, 19), make_request(30, 3),
                                         make_request(3, 6)};
  const Run result = run(requests, make_options(32));
  REQUIRE(result.completions.size() == requests.size());
  const std::array<std::vector<std::string>, 7> reasons = {{{},
                                                            {"empty"},
                                                            {"no new tokens"},
                                                            {"no new tokens"},
                                                            {"30", "19", "48", "context"},
                                                            {"33 slots", "32", "cache"},
                                                            {}}};
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Completion& completion = result.completions[i];
    CAPTURE(i, completion.error);
    const bool rejected = !reasons[i].empty();
    CHECK((completion.finish_reason == FinishReason::kRejected) == rejected);
    CHECK(completion.error.empty() == !rejected);
    for (const std::string& part : reasons[i]) {
      CHECK(contains(completion.error, part));
    }
    CHECK(completion.error.find('\n') == std::string::npos);
    CHECK(completion.tokens == (rejected ? std::vector<Token>{} : tokens_alone(requests[i])));
    CHECK(result.streamed[i] == completion.tokens);
  }
  CHECK(result.usage.reserved == 0);
}

TEST_CASE("engine: the largest requests that fit") {
  const Run whole_context =
      run({make_request(kSmallContext - 1, 1), make_request(1, kSmallContext - 1)}, make_options(4096));
  CHECK(whole_context.completions[0].tokens.size() == 1);
  CHECK(whole_context.completions[1].tokens.size() == kSmallContext - 1);
  CHECK(run({make_request(kSmallContext, 1)}, make_options(4096)).completions[0].finish_reason ==
        FinishReason::kRejected);

  const Run whole_cache = run({make_request(6, 4)}, make_options(10));
  CHECK(whole_cache.completions[0].tokens == tokens_alone(make_request(6, 4)));
  CHECK(run({make_request(6, 4)}, make_options(9)).completions[0].finish_reason == FinishReason::kRejected);
  // A sum that does not fit an int is refused like any other.
  CHECK(run({make_request(6, std::numeric_limits<int>::max())}, make_options(10)).completions[0].finish_reason ==
        FinishReason::kRejected);
}

TEST_CASE("engine: no requests, or only rejected ones") {
  CHECK(run({}, make_options(10)).completions.empty());
  const Run result = run({make_request(0, 1)}, make_options(10));
  CHECK(result.counter("forward_passes") == 0);
  CHECK(result.counter("slots_reserved") == 0);
}

TEST_CASE("engine: the next batch starts when the whole batch before it is done") {
  // 20 slots: requests 0 and 1 take 8 + 12. Request 0 is done early, and its slots stay unused until 1 is done too.
  const std::vector<Request> requests = {make_request(5, 3, 0), make_request(4, 8, 1), make_request(6, 2, 2),
                                         make_request(2, 4, 3)};
  const Run result = run(requests, make_options(20));
  CHECK(result.order == std::vector<int>{0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 3, 2, 3, 3, 3});
  CHECK(result.counter("max_requests_at_once") == 2);
  const Run roomy = run(requests, make_options(4096));
  CHECK(roomy.counter("max_requests_at_once") == 4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    CHECK(result.completions[i].tokens == roomy.completions[i].tokens);
    CHECK(result.completions[i].tokens == tokens_alone(requests[i]));
    CHECK(result.completions[i].finish_reason == FinishReason::kLength);
    CHECK(static_cast<int>(result.completions[i].tokens.size()) == requests[i].max_new_tokens);
  }
}

TEST_CASE("engine: no request overtakes another") {
  // Request 2 would fit beside 0, but 1 is before it and does not.
  const std::vector<Request> requests = {make_request(4, 4, 0), make_request(6, 4, 1), make_request(1, 1, 2)};
  CHECK(run(requests, make_options(12)).order == std::vector<int>{0, 0, 0, 0, 1, 2, 1, 1, 1});
}

TEST_CASE("engine: a stop token ends the text, is not part of it, and is not handed out") {
  Request request = make_request(5, 12);
  const std::vector<Token> all = tokens_alone(request);
  REQUIRE(all.size() == 12);
  for (const std::size_t step : {std::size_t{0}, std::size_t{3}, std::size_t{11}}) {
    CAPTURE(step);
    request.stop_tokens = {60, all[step]};
    const auto end = std::find_first_of(all.begin(), all.end(), request.stop_tokens.begin(), request.stop_tokens.end());
    const std::vector<Token> expected(all.begin(), end);
    const Run result = run({request, make_request(3, 4)}, make_options(64));
    CHECK(result.completions[0].tokens == expected);
    CHECK(result.completions[0].finish_reason == FinishReason::kStop);
    CHECK(result.completions[0].error.empty());
    CHECK(result.streamed[0] == expected);
    CHECK(result.completions[1].tokens == tokens_alone(make_request(3, 4)));
    CHECK(result.usage.reserved == 0);
  }
}

TEST_CASE("engine: counters of one request, by hand") {
  // Prompt 5 in chunks of 2, 3 new tokens. The last token drawn is never computed, so its slot stays empty.
  //   tokens of a pass    2  2  1 | 1 | 1      a round draws one token: three passes, then one, then one
  //   length after it     2  4  5 | 6 | 7      sum over the passes 24, over the rounds 18
  const Run result = run({make_request(5, 3)}, make_options(30, 2));
  CHECK(result.counter("max_requests_at_once") == 1);
  CHECK(result.counter("requests_held") == 1);
  CHECK(result.counter("forward_passes") == 5);
  CHECK(result.counter("slots_total") == 30);
  CHECK(result.counter("slots_reserved") == 8);
  CHECK(result.counter("slots_used") == 6);
  CHECK(result.counter("slots_to_come") == 1);         // 2, 1 and 0
  CHECK(result.counter("slots_never_used") == 1);      // the last token's, in every round
  const double bytes_per_token = 2.0 * 2 * 4 * 8 * 4;  // K and V, layers, heads, head_dim, bytes
  CHECK(result.counter("kv_bytes_per_token") == bytes_per_token);
  CHECK(result.counter("kv_bytes_read") / bytes_per_token == 24);
  CHECK(result.timing.prefill_tokens == 5);
  CHECK(result.timing.decode_tokens == 2);
}

TEST_CASE("engine: counters of two requests side by side, by hand") {
  // Request 0: prompt 5 of 8 slots, three rounds. Request 1: prompt 2 of 3 slots, done after the first round.
  const Run result = run({make_request(5, 3), make_request(2, 1)}, make_options(30));
  CHECK(result.counter("max_requests_at_once") == 2);
  CHECK(result.counter("forward_passes") == 4);
  CHECK(result.counter("requests_held") == 4.0 / 3);     // 2, 1, 1
  CHECK(result.counter("slots_reserved") == 27.0 / 3);   // 8 + 3, 8, 8
  CHECK(result.counter("slots_used") == 20.0 / 3);       // 5 + 2, 6, 7
  CHECK(result.counter("slots_to_come") == 3.0 / 3);     // 2 + 0, 1, 0
  CHECK(result.counter("slots_never_used") == 4.0 / 3);  // 1 + 1, 1, 1
  const double bytes_per_token = result.counter("kv_bytes_per_token");
  CHECK(result.counter("kv_bytes_read") / bytes_per_token == 20);
  CHECK(result.timing.prefill_tokens == 7);
  CHECK(result.timing.decode_tokens == 2);
}

TEST_CASE("engine: reserving the whole context") {
  stage1::EngineOptions options = make_options(2 * kSmallContext + 5);
  options.reserve_context = true;
  const std::vector<Request> requests = {make_request(5, 3, 0), make_request(4, 2, 1), make_request(3, 3, 2)};
  const Run result = run(requests, options);
  // Three would need 18 slots; each takes 48, so the third waits for the others.
  CHECK(result.order == std::vector<int>{0, 1, 0, 1, 0, 2, 2, 2});
  CHECK(result.counter("max_requests_at_once") == 2);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CHECK(result.completions[i].tokens == tokens_alone(requests[i]));
  }
  const Run lone = run({make_request(5, 3)}, options);
  CHECK(lone.counter("slots_reserved") == kSmallContext);
  CHECK(lone.counter("slots_never_used") == kSmallContext - 7);  // of the 3 new tokens, 2 are computed

  options.num_slots = kSmallContext - 1;
  const Run rejected = run({make_request(5, 3)}, options);
  CHECK(rejected.completions[0].finish_reason == FinishReason::kRejected);
  CHECK(contains(rejected.completions[0].error, "48 slots"));
}

TEST_CASE("engine: a request draws by its own seed, whatever runs beside it") {
  std::vector<Request> requests;
  for (int i = 0; i < 3; ++i) {
    Request request = make_request(4, 20);
    request.sampling.temperature = 1.5F;
    request.sampling.seed = i == 2 ? 8 : 7;
    requests.push_back(request);
  }
  const Run result = run(requests, make_options(4096));
  CHECK(result.completions[0].tokens == result.completions[1].tokens);
  CHECK(result.completions[0].tokens != result.completions[2].tokens);
  CHECK(result.completions[2].tokens == tokens_alone(requests[2]));
}

TEST_CASE("engine: a token is drawn for the position that it will have") {
  Request request = make_request(4, 20);
  request.sampling.temperature = 1.5F;
  request.sampling.seed = 7;
  request.sample_index = 3;
  stage1::Engine engine(small_model(), make_options(30));
  REQUIRE(engine.manager().allocate(0, 24));
  std::vector<Token> expected;
  std::vector<Token> last = request.prompt;
  for (int position = 4; position < 24; ++position) {
    const std::optional<Matrix> logits = engine.append(0, last);
    REQUIRE(logits.has_value());
    last = {common::sample({logits->data(), static_cast<std::size_t>(logits->cols())}, request.sampling, position,
                           request.sample_index)};
    expected.push_back(last[0]);
  }
  INFO("sample_index 3; the first token is drawn for position 4, the number of tokens before it");
  CHECK(tokens_alone(request) == expected);
}

TEST_CASE("engine: append computes the same logits in any chunks, and refuses without a trace") {
  const Request request = make_request(11, 1);
  std::optional<Matrix> expected;
  struct Case {
    int chunk_size;
    int passes;
    int tokens_read;  // each pass reads what the cache holds after it
  };
  for (const auto& [chunk_size, passes, tokens_read] :
       {Case{256, 1, 11}, Case{1, 11, 66}, Case{4, 3, 4 + 8 + 11}, Case{11, 1, 11}}) {
    INFO("11 tokens in chunks of at most " << chunk_size << ", and in a single pass: either may be wrong");
    stage1::Engine engine(small_model(), make_options(20, chunk_size));
    engine.cache().fill(kNaN);
    REQUIRE(engine.manager().allocate(0, 12));
    const std::optional<Matrix> logits = engine.append(0, request.prompt);
    REQUIRE(logits.has_value());
    CHECK(logits->rows() == 1);
    REQUIRE(logits->cols() == 61);
    CHECK(engine.manager().length(0) == 11);
    expected = expected.has_value() ? expected : logits;
    // Logits of this model have size 1; two layers of float32 sums of up to 48 terms keep five digits and more.
    const auto as_span = [](const Matrix& row) { return std::span(row.data(), static_cast<std::size_t>(row.cols())); };
    CHECK(tests::compare(as_span(*logits), as_span(*expected), {1e-5, 1e-5}) == kNoProblem);
    const std::vector<common::Counter> counters = engine.counters();
    CHECK(common::counter(counters, "forward_passes") == passes);
    CHECK(common::counter(counters, "kv_bytes_read") / common::counter(counters, "kv_bytes_per_token") == tokens_read);
    CHECK(engine.timing().prefill_tokens == 11);  // booked once for the whole prompt, in chunks or not
    CHECK(engine.timing().decode_tokens == 0);

    const std::string before = describe(engine.manager());
    CHECK_FALSE(engine.append(0, std::vector<Token>{1, 2}).has_value());  // one slot is left
    CHECK(describe(engine.manager()) == before);
    CHECK(engine.append(0, std::vector<Token>{1}).has_value());
  }
}

TEST_CASE("engine: misuse is noticed") {
  CHECK_THROWS_AS(stage1::Engine(small_model(), make_options(10, 0)), CheckError);
  CHECK_THROWS_AS(stage1::Engine(small_model(), make_options(0)), CheckError);
  stage1::Engine engine(small_model(), make_options(10));
  REQUIRE(engine.manager().allocate(0, 5));
  CHECK_THROWS_AS(engine.append(0, {}), CheckError);
  CHECK_THROWS_AS(engine.append(1, std::vector<Token>{1}), CheckError);
}
