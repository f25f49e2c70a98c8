// What happens with requests when the runner fails: in a copy, while enqueuing, in a wait. Compiled once for each
// stage.
#include <Eigen/Core>

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/fake_runner.h"
#include "tests/support/catch.h"

using common::Token;
using tests::FakeEngine;
using tests::make_request;
using tests::RunnerCall;
using tests::RunnerFault;
using tests::small_model;

#if STAGE_NUMBER < 8
namespace {

std::vector<common::Request> three_requests() {
  return {make_request(5, 7), make_request(9, 4, 1), make_request(3, 6, 2)};
}

std::vector<std::vector<Token>> texts(stage::Engine& engine) {
  std::vector<std::vector<Token>> result;
  for (const common::Completion& completion : tests::run_requests(engine, three_requests()).completions) {
    result.push_back(completion.tokens);
  }
  return result;
}

}  // namespace

TEST_CASE("runner: a step that fails ends the run, and no slot is lost: the next run writes what it should") {
  FakeEngine undisturbed(small_model());
  const auto expected = texts(*undisturbed.engine);
  for (const RunnerCall call : {RunnerCall::kEnqueue, RunnerCall::kWait}) {
    for (const bool is_done : {false, true}) {
      FakeEngine fake(small_model());
      fake.runner->fail(call, 1, is_done);
      CHECK_THROWS_AS(texts(*fake.engine), RunnerFault);
      CHECK(fake.engine->manager().sequences().empty());
      CHECK(fake.engine->manager().usage().reserved == 0);
      CHECK(texts(*fake.engine) == expected);
    }
  }
}
#endif

TEST_CASE("runner: tokens whose step could not be enqueued are not in the cache, and can be appended again") {
  const std::vector<Token> prompt = make_request(9, 1).prompt;
  FakeEngine undisturbed(small_model());
  REQUIRE(undisturbed.engine->start(0, prompt, 0));
  const auto expected = undisturbed.engine->append(0, prompt);
  for (const bool is_done : {false, true}) {
    FakeEngine fake(small_model());
    REQUIRE(fake.engine->start(0, prompt, 0));
    fake.runner->fail(RunnerCall::kEnqueue, 1, is_done);
    CHECK_THROWS_AS(fake.engine->append(0, prompt), RunnerFault);
    CHECK(fake.engine->manager().length(0) == 0);
    CHECK(fake.engine->append(0, prompt) == expected);
  }
}

TEST_CASE("runner: a copy that fails stays planned until it has been carried out") {
  const std::vector<Token> prompt = make_request(9, 1).prompt;
  const std::vector<Token> next = {3};
  FakeEngine undisturbed(small_model());
  REQUIRE(undisturbed.engine->start(0, prompt, 0));
  undisturbed.engine->append(0, prompt);
  const auto expected = undisturbed.engine->append(0, next);
  for (const bool is_done : {false, true}) {
    FakeEngine fake(small_model());
    REQUIRE(fake.engine->start(0, prompt, 0));
    fake.engine->append(0, prompt);
    fake.engine->manager().fork(0, 1);
    fake.runner->fail(RunnerCall::kCopy, 1, is_done);
    CHECK_THROWS_AS(fake.engine->append(1, next), RunnerFault);
    CHECK(fake.engine->append(1, next) == expected);
    CHECK(fake.runner->calls(RunnerCall::kCopy) == 2);
  }
}

TEST_CASE("runner: no block of a step that can't be waited for is found") {
  stage::EngineOptions options = tests::tight_options();
  options.block_size = 4;
  FakeEngine fake(small_model(), options);
  const std::vector<Token> prompt = make_request(9, 1).prompt;
  REQUIRE(fake.engine->start(0, prompt, 0));
  fake.runner->fail(RunnerCall::kWait, 1);
  CHECK_THROWS_AS(fake.engine->append(0, prompt), RunnerFault);
  fake.engine->manager().free(0);
  CHECK(fake.engine->manager().prefix_cache().find(prompt, 0).empty());
  REQUIRE(fake.engine->start(0, prompt, 0));
  REQUIRE(fake.engine->append(0, prompt).has_value());
  CHECK(fake.engine->manager().prefix_cache().find(prompt, 0).size() == 2);
}

TEST_CASE("runner: the result of a step that is not kept can't be had") {
  FakeEngine fake(small_model());
  const std::vector<Token> prompt = make_request(9, 1).prompt;
  REQUIRE(fake.engine->start(0, prompt, 0));
  REQUIRE(fake.engine->manager().reserve(0, 9));
  stage::RaggedBatch batch;
  batch.add(fake.engine->manager(), 0, prompt, true);
  const stage::StepId first = fake.runner->enqueue(batch);
  const std::vector<Token> tokens = fake.runner->wait(first).tokens;
  CHECK_THROWS_AS(fake.runner->wait({first.value + 1}), common::CheckError);
  fake.runner->enqueue(batch);
#if STAGE_NUMBER >= 8
  CHECK(fake.runner->wait(first).tokens == tokens);
  fake.runner->enqueue(batch);
#endif
  CHECK_THROWS_AS(fake.runner->wait(first), common::CheckError);
}

#if STAGE_NUMBER < 8
TEST_CASE("runner: logits without a largest one end in words, not in a token") {
  FakeEngine fake(small_model());
  fake.runner->on_result([](stage::StepResult& result) { result.tokens.assign(result.tokens.size(), -1); });
  const common::Request request = make_request(9, 1);  // a single token, which is never appended
  CHECK_THROWS_AS(tests::run_requests(*fake.engine, std::span(&request, 1)), common::InputError);
}

TEST_CASE("runner: a greedy token is all that is fetched, and logits only to draw from them") {
  stage::EngineOptions options;
  options.chunk_size = 4;
  FakeEngine fake(small_model(), options);
  std::vector<std::size_t> rows;  // of logits, chunk by chunk
  fake.runner->on_batch([&](const stage::RaggedBatch& batch) { rows.push_back(batch.logits_rows.size()); });
  std::vector<std::pair<std::size_t, Eigen::Index>> fetched;  // tokens and logits, step by step
  fake.runner->on_result(
      [&](stage::StepResult& result) { fetched.emplace_back(result.tokens.size(), result.logits.size()); });
  common::Request request = make_request(9, 1);
  for (const float temperature : {0.0F, 1.5F}) {
    request.sampling.temperature = temperature;
    (void)tests::run_requests(*fake.engine, std::span(&request, 1));
  }
  CHECK(fetched == std::vector<std::pair<std::size_t, Eigen::Index>>{{1, 0}, {0, small_model().config().vocab_size}});
  // 9 tokens in chunks of 4, 4 and 1, twice: the last chunk alone needs logits.
  CHECK(rows == std::vector<std::size_t>{0, 0, 1, 0, 0, 1});
}
#else
namespace {

// An engine over a runner that can fail, and two requests that share its steps.
struct Served {
  explicit Served(bool run_ahead, int token_budget = 256)
      : fake(small_model(), engine_options(run_ahead, token_budget)) {
    for (const common::Request& request : requests) {
      ids.push_back(engine.submit({request}));
    }
  }

  // Until all have ended. Then no slot is in use.
  void run() {
    while (!engine.is_idle()) {
      REQUIRE(engine.step());
    }
    REQUIRE_FALSE(engine.step());  // or a loop over it never ends
    CHECK(fake.engine->manager().sequences().empty());
    CHECK(fake.engine->manager().usage().reserved == 0);
  }
  bool has_failed(int id) const { return engine.output(id).finish_reason == common::FinishReason::kFailed; }
  const std::vector<Token>& tokens(int id) const { return engine.output(id).completions.front().tokens; }
  static std::vector<Token> expected(const common::Request& request) {
    stage::EngineOptions options;
    options.gpu.device = stage::Device::kCpu;
    stage::Engine undisturbed(small_model(), options);
    return tests::run_requests(undisturbed, std::span(&request, 1)).completions.front().tokens;
  }
  // A new request gets its text.
  void check_serves() {
    const common::Request request = make_request(6, 5, 7);
    const int id = engine.submit({request});
    run();
    CHECK(tokens(id) == expected(request));
  }

  static stage::EngineOptions engine_options(bool run_ahead, int token_budget) {
    stage::EngineOptions options;
    options.block_size = 4;
    options.scheduler = {.token_budget = token_budget, .headroom = 0, .run_ahead = run_ahead};
    return options;
  }

  FakeEngine fake;
  stage::Engine& engine = *fake.engine;
  std::vector<common::Request> requests = {make_request(5, 9), make_request(9, 9, 1)};
  std::vector<int> ids;
};

}  // namespace

TEST_CASE("the loop: a wait that throws fails all requests of the step, also a chunk without a row, and no other") {
  Served served(false, 8);  // the first step computes the first prompt, and 3 of the second's 9 tokens
  const common::Request request = make_request(6, 5, 2);
  const int waiting = served.engine.submit({request});
  served.fake.runner->fail(RunnerCall::kWait, 1);
  CHECK_NOTHROW(served.engine.step());
  CHECK(served.fake.runner->calls(RunnerCall::kWait) == 1);
  CHECK(served.has_failed(served.ids[0]));
  CHECK(served.has_failed(served.ids[1]));
  CHECK_FALSE(served.has_failed(waiting));
  // The first prompt fills a block, which is not published.
  CHECK(served.engine.manager().prefix_cache().find(served.requests[0].prompt, 0).empty());
  served.run();
  CHECK(served.tokens(waiting) == Served::expected(request));
}

TEST_CASE("the loop: how long a step has been waited for is in its report") {
  Served served(false);
  served.fake.runner->on_result([](stage::StepResult&) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  double waiting_seconds = 0.0;
  served.engine.on_step([&](const stage::StepReport& report) { waiting_seconds = report.waiting_seconds; });
  REQUIRE(served.engine.step());
  CHECK(waiting_seconds >= 1e-3);
}

TEST_CASE("runner: a step that cannot be enqueued is done again, and no text changes") {
  for (const bool run_ahead : {false, true}) {
    for (const bool is_done : {false, true}) {
      for (const int step : {0, 1, 4}) {
        Served served(run_ahead);
        for (int i = 0; i < step; ++i) {
          served.engine.step();
        }
        served.fake.runner->fail(RunnerCall::kEnqueue, 1, is_done);
        served.run();
        for (std::size_t i = 0; i < served.ids.size(); ++i) {
          CAPTURE(run_ahead, is_done, step, i, served.engine.output(served.ids[i]).error);
          CHECK(served.tokens(served.ids[i]) == Served::expected(served.requests[i]));
        }
      }
    }
  }
}

TEST_CASE("runner: requests fail whose step cannot be waited for, once, and the loop goes on") {
  for (const bool run_ahead : {false, true}) {
    Served served(run_ahead);
    served.engine.step();
    served.engine.step();
    const int num_waits = served.fake.runner->calls(RunnerCall::kWait);
    served.fake.runner->fail(RunnerCall::kWait, 1);
    served.engine.step();
    CHECK(served.fake.runner->calls(RunnerCall::kWait) == num_waits + 1);
    CHECK(served.has_failed(served.ids[0]));
    CHECK(served.has_failed(served.ids[1]));
    served.run();
    served.check_serves();
  }
}

TEST_CASE("runner: a request that is stopped and forgotten while its step is in flight, which then fails") {
  for (const std::size_t victim : {std::size_t{0}, std::size_t{1}}) {
    Served served(true);
    served.engine.step();
    served.engine.step();
    served.engine.stop(served.ids[victim], common::FinishReason::kCancelled);
    served.engine.forget(served.ids[victim]);
    served.fake.runner->fail(RunnerCall::kWait, 1);
    CHECK_NOTHROW(served.engine.step());
    served.run();
    CHECK(served.has_failed(served.ids[1 - victim]));
    served.check_serves();
  }
}

TEST_CASE("runner: a request whose logits have no largest one fails, and the others are served") {
  for (const bool run_ahead : {false, true}) {
    Served served(run_ahead);
    int step = 0;
    served.fake.runner->on_result([&](stage::StepResult& result) {
      if (++step == 3) {
        REQUIRE(result.tokens.size() == 2);
        result.tokens.front() = -1;
      }
    });
    served.run();
    CHECK(served.has_failed(served.ids[0]) != served.has_failed(served.ids[1]));
    for (std::size_t i = 0; i < served.ids.size(); ++i) {
      if (!served.has_failed(served.ids[i])) {
        CHECK(served.tokens(served.ids[i]) == Served::expected(served.requests[i]));
      } else {  // the model's fault, told to its user: no place in the source
        const std::string& error = served.engine.output(served.ids[i]).error;
        CHECK(error == "the model computes NaN or +inf as a logit, or -inf for all");
      }
    }
    served.check_serves();
  }
}

TEST_CASE("runner: a result with fewer rows than the step asked for fails its requests, and the loop goes on") {
  for (const bool run_ahead : {false, true}) {
    Served served(run_ahead);
    int step = 0;
    served.fake.runner->on_result([&](stage::StepResult& result) {
      if (++step == 3) {
        result.tokens.pop_back();
      }
    });
    served.run();
    CHECK(served.has_failed(served.ids[0]));
    CHECK(served.has_failed(served.ids[1]));
    served.check_serves();
  }
}

TEST_CASE("runner: the logits of a row are returned if they are asked for, and beside it tokens are drawn as ever") {
  Served served(true);
  common::Request with_logprobs = make_request(6, 9, 2);
  with_logprobs.num_logprobs = 2;
  const int id = served.engine.submit({with_logprobs});
  int num_mixed = 0;
  served.fake.runner->on_result([&](stage::StepResult& result) {
    REQUIRE(result.logits.size() == result.tokens.size());
    for (std::size_t row = 0; result.tokens.size() == 3 && row < 3; ++row) {
      CHECK((result.logits[row].size() > 0) == (row == 2));
      CHECK((result.tokens[row] >= 0 || row == 2));
      ++num_mixed;
    }
  });
  served.run();
  CHECK(num_mixed == 9 * 3);
  CHECK(served.tokens(id) == Served::expected(with_logprobs));
  CHECK(served.engine.output(id).completions.front().logprobs.size() == 9);
  for (std::size_t i = 0; i < served.ids.size(); ++i) {
    CHECK(served.tokens(served.ids[i]) == Served::expected(served.requests[i]));
  }
}

TEST_CASE("runner: copies of forks fail, and every sample gets its text") {
  common::Request request = make_request(6, 8, 1);
  request.sampling.temperature = 1.0F;
  for (const bool is_done : {false, true}) {
    Served served(true);
    const int id = served.engine.submit({request, 3});
    served.fake.runner->fail(RunnerCall::kCopy, 1, is_done);
    served.run();
    CHECK(served.fake.runner->calls(RunnerCall::kCopy) > 1);
    for (int sample = 0; sample < 3; ++sample) {
      common::Request lone = request;
      lone.sample_index = sample;
      CHECK(served.engine.output(id).completions[static_cast<std::size_t>(sample)].tokens == Served::expected(lone));
    }
  }
}
#endif

TEST_CASE("runner: options are checked before one is built") {
  stage::EngineOptions options;
  tests::max_pass_tokens(options) = 0;
  options.gpu = {stage::Device::kCpu, {common::Precision::kBFloat16}};  // for which there is no runner
  CHECK_THROWS_AS(stage::Engine(small_model(), options), common::CheckError);
}
