// On the CPU, stage 7 is stage 6: the same blocks, the same floats to the last bit, the same texts.
#include "tests/support/catch.h"

#include <string>
#include <vector>

#include "stage6/attention.h"
#include "stage6/engine.h"
#include "stage7/attention.h"
#include "stage7/cpu_runner.h"
#include "stage7/engine.h"
#include "tests/stages/collapse.h"

namespace {

const std::string kNoDifference;

TESTS_STAGE(Before, stage6);
TESTS_STAGE(Stage7, stage7);
struct After : Stage7 {
  using CpuRunner = stage7::CpuRunner;
};

}  // namespace

TEST_CASE("attention is stage 6's, bit for bit") { tests::check_same_attention<Before, After>(); }

TEST_CASE("logits through the engine are stage 6's, bit for bit") {
  for (const int block_size : {1, 3, 16, 64}) {
    stage6::EngineOptions before;
    before.block_size = block_size;
    stage7::EngineOptions after;
    after.block_size = block_size;
    after.gpu.device = stage7::Device::kCpu;
    CAPTURE(block_size);
    CHECK(tests::compare_logits(tests::engine_logits<After>(after, 21, 6), tests::engine_logits<Before>(before, 21, 6),
                                std::nullopt) == kNoDifference);
  }
}

TEST_CASE("a tight pool is used block for block as in stage 6") { tests::check_same_blocks<Before, After>(); }
