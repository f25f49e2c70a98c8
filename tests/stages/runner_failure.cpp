// What becomes of requests when the runner fails: at copying, at enqueuing, at waiting. Compiled once a stage.
#include <memory>
#include <span>
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

#if STAGE_NUMBER < 8
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

#if STAGE_NUMBER < 8
TEST_CASE("runner: logits without a largest one end in words, not in a token") {
  FakeEngine fake(small_model());
  fake.runner->on_result([](stage::StepResult& result) { result.tokens.assign(result.tokens.size(), -1); });
  CHECK_THROWS_AS(texts(*fake.engine), common::CheckError);
}
#endif

TEST_CASE("runner: options are checked before one is built") {
  stage::EngineOptions options;
  options.chunk_size = 0;
  options.gpu = {stage::Device::kCpu, stage::Precision::kBFloat16};  // for which there is no runner
  CHECK_THROWS_AS(stage::Engine(small_model(), options), common::CheckError);
}
