// On the CPU, stage 7 is stage 6: the same blocks, the same floats to the last bit, the same texts.
#include "tests/support/catch.h"

#include <string>
#include <vector>

#include "stage6/attention.h"
#include "stage6/engine.h"
#include "stage7/attention.h"
#include "stage7/engine.h"
#include "tests/stages/collapse.h"

using tests::Arrival;
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

TESTS_STAGE(Before, stage6);
TESTS_STAGE(After, stage7);

}  // namespace

TEST_CASE("attention is stage 6's, bit for bit") {
  for (const AttentionShape& shape : {AttentionShape{4, 2, 32, 1}, AttentionShape{3, 1, 33, 2}}) {
    for (const int block_size : {1, 3, 16, 64}) {
      for (const int chunk_size : {37, 1, 7}) {
        CHECK(tests::compare_stages<Before, After>(shape, block_size, Arrival{37, chunk_size, 2}, true) ==
              kNoDifference);
      }
    }
  }
}

TEST_CASE("logits through the engine are stage 6's, bit for bit") {
  for (const int block_size : {1, 3, 16, 64}) {
    stage6::EngineOptions before;
    before.block_size = block_size;
    stage7::EngineOptions after;
    after.block_size = block_size;
    after.gpu.device = stage7::Device::kCpu;
    CAPTURE(block_size);
    CHECK(tests::compare_layers(tests::engine_logits<After>(after, 21, 6), tests::engine_logits<Before>(before, 21, 6),
                                std::nullopt) == kNoDifference);
  }
}

TEST_CASE("a tight pool is used block for block as in stage 6") {
  stage6::KvCacheManager before(7, 3);
  stage7::KvCacheManager after(7, 3);
  common::Random random(11);
  for (int step = 0; step < 2000; ++step) {
    const auto sequence = static_cast<int>(random.below(4));
    const auto count = static_cast<int>(random.below(6)) + 1;
    if (!before.contains(sequence)) {
      REQUIRE(before.allocate(sequence, count) == after.allocate(sequence, count));
    } else if (random.below(4) == 0) {
      before.free(sequence);
      after.free(sequence);
    } else {
      const bool reserved = before.reserve(sequence, count);
      REQUIRE(after.reserve(sequence, count) == reserved);
      if (reserved) {
        before.commit(sequence, count);
        after.commit(sequence, count);
      }
    }
    REQUIRE(after.pending_copies().empty());
    REQUIRE(after.free_blocks() == before.free_blocks());
    if (before.contains(sequence)) {
      REQUIRE(after.block_table(sequence) == before.block_table(sequence));
    }
    REQUIRE(after.usage().used == before.usage().used);
    REQUIRE(after.usage().reserved == before.usage().reserved);
  }
}
