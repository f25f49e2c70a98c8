// With a cold cache, stage 6 is stage 5: the same blocks, the same floats to the last bit, the same texts.
#include "tests/support/catch.h"

#include <string>
#include <vector>

#include "stage5/attention.h"
#include "stage5/engine.h"
#include "stage6/attention.h"
#include "stage6/engine.h"
#include "tests/stages/collapse.h"

using tests::Arrival;
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

TESTS_STAGE(Before, stage5);
TESTS_STAGE(After, stage6);

}  // namespace

TEST_CASE("attention is stage 5's, bit for bit") {
  for (const AttentionShape& shape : {AttentionShape{4, 2, 32, 1}, AttentionShape{3, 1, 33, 2}}) {
    for (const int block_size : {1, 3, 16, 64}) {
      for (const int chunk_size : {37, 1, 7}) {
        CHECK(tests::compare_stages<Before, After>(shape, block_size, Arrival{37, chunk_size, 2}, true) ==
              kNoDifference);
      }
    }
  }
}

TEST_CASE("logits through the engine are stage 5's, bit for bit") {
  for (const int block_size : {1, 3, 16, 64}) {
    stage5::EngineOptions unshared;
    unshared.block_size = block_size;
    stage6::EngineOptions shared;
    shared.block_size = block_size;
    CAPTURE(block_size);
    CHECK(tests::compare_logits(tests::engine_logits<After>(shared, 21, 6),
                                tests::engine_logits<Before>(unshared, 21, 6), std::nullopt) == kNoDifference);
  }
}

TEST_CASE("a tight pool is used block for block as in stage 5") {
  stage5::KvCacheManager unshared(7, 3);
  stage6::KvCacheManager shared(7, 3);
  common::Random random(11);
  for (int step = 0; step < 2000; ++step) {
    const auto sequence = static_cast<int>(random.below(4));
    const auto count = static_cast<int>(random.below(6)) + 1;
    if (!unshared.contains(sequence)) {
      REQUIRE(unshared.allocate(sequence, count) == shared.allocate(sequence, count));
    } else if (random.below(4) == 0) {
      unshared.free(sequence);
      shared.free(sequence);
    } else {
      const bool reserved = unshared.reserve(sequence, count);
      REQUIRE(shared.reserve(sequence, count) == reserved);
      if (reserved) {
        unshared.commit(sequence, count);
        shared.commit(sequence, count);
      }
    }
    REQUIRE(shared.pending_copies().empty());
    REQUIRE(shared.free_blocks() == unshared.free_blocks());
    if (unshared.contains(sequence)) {
      REQUIRE(shared.block_table(sequence) == unshared.block_table(sequence));
    }
    REQUIRE(shared.usage().used == unshared.usage().used);
    REQUIRE(shared.usage().reserved == unshared.usage().reserved);
  }
}
