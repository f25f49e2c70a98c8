// A copy of blocks that fails once: it stays planned until it has been carried out. Compiled once a stage.
//
// The program has the stage's own cache, compiled here, except for copy_blocks(), which calls the stage's or throws.
#include "tests/support/catch.h"
#include "tests/support/stage_header.h"

// The class gets a second member function, which the stage's definition then belongs to.
#define copy_blocks(...)    \
  copy_blocks(__VA_ARGS__); \
  void copy_blocks_of_the_stage(__VA_ARGS__)
#include STAGE_HEADER(kv_cache.h)
#undef copy_blocks
#define copy_blocks copy_blocks_of_the_stage
#include STAGE_HEADER(kv_cache.cpp)  // NOLINT(bugprone-suspicious-include)
#undef copy_blocks

#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#if STAGE_NUMBER >= 8
#include "tests/stages/serving_fixtures.h"
#endif

namespace {

struct CopyFailure : std::runtime_error {
  CopyFailure() : std::runtime_error("the copy has failed") {}
};

bool next_copy_fails = false;

// The device call that fails, counted from 1: calls are copies, and layers of a forward pass. 0: none fails.
int calls_until_fault = 0;

void device_call() {
  if (calls_until_fault > 0 && --calls_until_fault == 0) {
    throw std::runtime_error("a device call has failed");
  }
}

}  // namespace

namespace STAGE_NAMESPACE {

void KvCache::copy_blocks(std::span<const BlockCopy> copies) {
  if (!copies.empty() && std::exchange(next_copy_fails, false)) {
    throw CopyFailure();
  }
  if (!copies.empty()) {
    device_call();
  }
  copy_blocks_of_the_stage(copies);
  if (!copies.empty()) {
    device_call();  // they have been carried out, and it is not known: as when a GPU's stream reports an error
  }
}

}  // namespace STAGE_NAMESPACE

namespace {

// The logits after a token that a fork writes into a shared block; what the copy does not bring is NaN.
common::Matrix logits_of_fork(bool copy_fails) {
  stage::EngineOptions options;
  options.num_slots = 64;
  options.block_size = 4;
#if STAGE_NUMBER >= 7
  options.gpu.device = stage::Device::kCpu;
#endif
  tests::SequenceEngine engine(tests::small_model(), options);
  tests::poison(engine);
  stage::KvCacheManager& manager = engine.manager();
  const std::vector<common::Token> prompt = tests::make_request(6, 1).prompt;
  REQUIRE(manager.allocate(0, 6));
  REQUIRE(engine.append(0, prompt).has_value());
  manager.fork(0, 1);

  const common::Token token = 5;
  if (copy_fails) {
    next_copy_fails = true;
    CHECK_THROWS_AS(engine.append(1, {&token, 1}), CopyFailure);
    REQUIRE_FALSE(next_copy_fails);
    CHECK(manager.pending_copies().size() == 1);
    CHECK(manager.length(1) == 6);
  }
  const std::optional<common::Matrix> logits = engine.append(1, {&token, 1});
  REQUIRE(logits.has_value());
  CHECK(manager.pending_copies().empty());
  CHECK(common::counter(engine.counters(), "blocks_copied") == 1);
  return *logits;
}

}  // namespace

TEST_CASE("a copy that fails stays planned, and is carried out with the next pass") {
  const bool is_equal = logits_of_fork(true) == logits_of_fork(false);
  CHECK(is_equal);
}

#if STAGE_NUMBER >= 8
TEST_CASE("a copy that fails in a step of two requests: both are computed alone, and get their texts") {
  tests::Serving serving({});
  std::vector<stage::GenerationRequest> requests;
  for (const int salt : {1, 2}) {
    requests.push_back({tests::make_request(6, 5, salt), 3});
    requests.back().request.sampling.temperature = 1.0F;
    serving.engine.submit(requests.back());
  }
  next_copy_fails = true;
  CHECK(serving.run().empty());
  REQUIRE_FALSE(next_copy_fails);
  for (const int id : {0, 1}) {
    const stage::RequestOutput& output = serving.engine.output(id);
    CAPTURE(output.error);
    const std::vector<common::Completion> alone = tests::served_alone(requests[static_cast<std::size_t>(id)]);
    REQUIRE(output.completions.size() == alone.size());
    for (std::size_t sample = 0; sample < alone.size(); ++sample) {
      CHECK(output.completions[sample].tokens == alone[sample].tokens);
    }
  }
}

namespace {

// The logits of two sequences that have changed places with one another between cache and host: blocks are read and
// then written in one plan. fault: of the plan's device calls; 0: none.
std::vector<common::Matrix> logits_after_swaps(int fault) {
  stage::EngineOptions options;
  options.num_slots = 12;
  options.block_size = 4;
  options.num_host_slots = 64;
  options.gpu.device = stage::Device::kCpu;
  tests::SequenceEngine engine(tests::small_model(), options);
  tests::poison(engine);
  stage::KvCacheManager& manager = engine.manager();
  for (const int sequence : {0, 1}) {
    const std::vector<common::Token> prompt = tests::make_request(9, 1, sequence).prompt;
    REQUIRE(engine.start(sequence, prompt, 0));
    REQUIRE(engine.append(sequence, prompt).has_value());
    REQUIRE(manager.swap_out(std::vector{sequence}));
  }
  REQUIRE(manager.swap_in(std::vector{1}));
  const common::Token token = 5;
  REQUIRE(engine.append(1, {&token, 1}).has_value());
  REQUIRE(manager.swap_out(std::vector{1}));
  REQUIRE(manager.swap_in(std::vector{0}));  // into the blocks that the other sequence leaves
  std::vector<common::Matrix> result;
  if (fault > 0) {
    calls_until_fault = fault;
    CHECK_THROWS_AS(engine.append(0, {&token, 1}), std::runtime_error);
    REQUIRE(calls_until_fault == 0);
  }
  result.push_back(engine.append(0, {&token, 1}).value());
  REQUIRE(manager.swap_out(std::vector{0}));
  REQUIRE(manager.swap_in(std::vector{1}));
  result.push_back(engine.append(1, {&token, 1}).value());
  return result;
}

}  // namespace

TEST_CASE("a plan that fails halfway is taken up where it failed: what has been overwritten is not copied again") {
  const std::vector<common::Matrix> expected = logits_after_swaps(0);
  for (const int fault : {1, 2, 3, 4}) {
    CAPTURE(fault);
    const std::vector<common::Matrix> actual = logits_after_swaps(fault);
    CHECK(bool(actual[0] == expected[0]));
    CHECK(bool(actual[1] == expected[1]));
  }
}

TEST_CASE(
    "the k-th device call fails, for every k of a run: the other texts are those of lone runs, no block is lost") {
  std::vector<stage::GenerationRequest> requests = {{tests::make_request(5, 14, 0)},
                                                    {tests::make_request(6, 11, 1), 3},
                                                    {tests::make_request(7, 15, 2)},
                                                    {tests::make_request(4, 13, 3), 2},
                                                    {tests::make_request(9, 12, 4)}};
  std::vector<std::vector<common::Completion>> expected;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].request.sampling.temperature = i == 2 ? 0.0F : 1.0F;
    requests[i].request.sampling.seed = i;
    expected.push_back(tests::served_alone(requests[i]));
  }
  for (const bool run_ahead : {false, true}) {
    for (const stage::Preemption preemption : {stage::Preemption::kRecompute, stage::Preemption::kSwap}) {
      int k = 0;
      bool is_over = false;
      int num_failed = 0;
      int num_copied = 0;
      while (!is_over) {
        ++k;
        tests::ServingOptions options;
        options.num_blocks = 17;
        options.block_size = 3;
        options.num_host_blocks = 40;
        options.scheduler.token_budget = 20;
        options.scheduler.preemption = preemption;
        options.scheduler.run_ahead = run_ahead;
        tests::Serving serving(options);
        tests::cpu_runner(serving.engine).on_layer([](int) { device_call(); });
        for (const stage::GenerationRequest& request : requests) {
          serving.engine.submit(request);
        }
        calls_until_fault = k;
        CAPTURE(k, run_ahead, static_cast<int>(preemption));
        CHECK(serving.run().empty());
        is_over = calls_until_fault > 0;  // the run has fewer calls than that
        calls_until_fault = 0;
        int failed = 0;
        for (std::size_t i = 0; i < requests.size(); ++i) {
          const stage::RequestOutput& output = serving.engine.output(static_cast<int>(i));
          const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
          failed += has_failed ? 1 : 0;
          CHECK(tests::compare_output(output, expected[i], has_failed).empty());
        }
        CHECK(failed <= (is_over ? 0 : 1));  // only a request that has the step to itself
        num_failed += failed;
        num_copied += common::counter(serving.engine.counters(), "blocks_copied") > 0 ? 1 : 0;
      }
      CHECK(k > 60);
      CHECK(num_failed < k / 2);
      CHECK(num_copied == k);
    }
  }
}
#endif
