// A copy of blocks that fails once: it stays planned until it has been carried out. Compiled once a stage.
//
// The program has the stage's own cache, compiled here, but for copy_blocks(), which calls the stage's or throws.
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

}  // namespace

namespace STAGE_NAMESPACE {

void KvCache::copy_blocks(std::span<const BlockCopy> copies) {
  if (!copies.empty() && std::exchange(next_copy_fails, false)) {
    throw CopyFailure();
  }
  copy_blocks_of_the_stage(copies);
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
  stage::Engine engine(tests::small_model(), options);
  engine.cache().fill(std::numeric_limits<float>::quiet_NaN());
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
    serving.server.submit(requests.back());
  }
  next_copy_fails = true;
  CHECK(serving.run().empty());
  REQUIRE_FALSE(next_copy_fails);
  for (const int id : {0, 1}) {
    const stage::RequestOutput& output = serving.server.output(id);
    CAPTURE(output.error);
    const std::vector<common::Completion> alone = tests::served_alone(requests[static_cast<std::size_t>(id)]);
    REQUIRE(output.completions.size() == alone.size());
    for (std::size_t sample = 0; sample < alone.size(); ++sample) {
      CHECK(output.completions[sample].tokens == alone[sample].tokens);
    }
  }
}
#endif
