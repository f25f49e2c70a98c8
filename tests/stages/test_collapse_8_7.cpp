// With one request, stage 8 is stage 7: the same blocks, the same floats to the last bit, the same texts.
#include "tests/support/catch.h"

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stage7/attention.h"
#include "stage7/cpu_runner.h"
#include "stage7/engine.h"
#include "stage8/attention.h"
#include "stage8/cpu_runner.h"
#include "stage8/demo/lone_sequences.h"
#include "stage8/engine.h"
#include "tests/stages/collapse.h"

namespace {

const std::string kNoDifference;

TESTS_STAGE(Stage7, stage7);
struct Before : Stage7 {
  using CpuRunner = stage7::CpuRunner;
};
TESTS_STAGE(Stage8, stage8);
struct After : Stage8 {
  using CpuRunner = stage8::CpuRunner;
  struct Engine : stage8::Engine {
    using stage8::Engine::Engine;
    std::optional<common::Matrix> append(int sequence, std::span<const common::Token> tokens) {
      return stage8::LoneSequences(*this).append(sequence, tokens);
    }
  };
};

}  // namespace

TEST_CASE("attention is stage 7's, bit for bit") { tests::check_same_attention<Before, After>(); }

TEST_CASE("logits through the engine are stage 7's, bit for bit") {
  for (const int block_size : {1, 3, 16, 64}) {
    stage7::EngineOptions before;
    before.block_size = block_size;
    stage8::EngineOptions after;
    after.block_size = block_size;
    before.gpu.device = stage7::Device::kCpu;
    after.gpu.device = stage8::Device::kCpu;
    CAPTURE(block_size);
    CHECK(tests::compare_logits(tests::engine_logits<After>(after, 21, 6), tests::engine_logits<Before>(before, 21, 6),
                                std::nullopt) == kNoDifference);
  }
}

TEST_CASE("a tight pool is used block for block as in stage 7") { tests::check_same_blocks<Before, After>(); }

TEST_CASE("one request through the loop: stage 7's text, and its cache to the last bit") {
  for (const int budget : {1, 3, 8, 256}) {
    for (const int num_tokens : {1, 4, 17}) {
      const common::Request request = tests::make_request(num_tokens, 9);
      stage7::EngineOptions before_options;
      before_options.num_slots = 40;
      before_options.block_size = 4;
      before_options.chunk_size = budget;
      before_options.gpu.device = stage7::Device::kCpu;
      stage8::EngineOptions after_options;
      after_options.num_slots = 40;
      after_options.block_size = 4;
      after_options.scheduler.token_budget = budget;
      after_options.gpu.device = stage8::Device::kCpu;
      stage7::Engine before(tests::small_model(), before_options);
      After::Engine after(tests::small_model(), after_options);
      tests::kv_cache<Before>(before).fill(0.0F);
      tests::kv_cache<After>(after).fill(0.0F);
      const auto expected = before.run(std::span(&request, 1), [](int, common::Token) {});
      const auto actual = after.run(std::span(&request, 1), [](int, common::Token) {});
      CAPTURE(budget, num_tokens);
      CHECK(actual.front().tokens == expected.front().tokens);
      CHECK(actual.front().finish_reason == expected.front().finish_reason);
      for (int layer = 0; layer < 2; ++layer) {
        for (int block = 0; block < 10; ++block) {
          const common::MatrixView left = tests::kv_cache<After>(after).keys(layer, 1, 4 * block, 4);
          const common::MatrixView right = tests::kv_cache<Before>(before).keys(layer, 1, 4 * block, 4);
          CHECK(tests::compare_bits({left.data(), 4 * 8}, {right.data(), 4 * 8}) == kNoDifference);
        }
      }
    }
  }
}
