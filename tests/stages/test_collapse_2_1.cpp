// Stage 2 computes what stage 1 computes, to the last bit: gathering copies floats, and what follows is unchanged.
#include "tests/support/catch.h"

#include <array>
#include <string>

#include "stage1/attention.h"
#include "stage1/engine.h"
#include "stage2/attention.h"
#include "stage2/engine.h"
#include "tests/stages/collapse.h"
#include "tests/support/thread_count.h"

using tests::Arrival;
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

TESTS_STAGE(Contiguous, stage1);
TESTS_STAGE(Blocks, stage2);

constexpr std::array<AttentionShape, 6> kShapes = {
    {{1, 1, 5, 1}, {4, 2, 32, 1}, {3, 1, 33, 1}, {8, 8, 64, 1}, {6, 2, 1, 2}, {8, 1, 20, 1}}};

}  // namespace

TEST_CASE("one block that holds the whole sequence is stage 1, bit for bit") {
  for (const AttentionShape& shape : kShapes) {
    for (const int prompt : {1, 2, 5, 15, 16, 17, 40}) {
      for (const int chunk_size : {prompt, 1, 7}) {
        CHECK(tests::compare_stages<Contiguous, Blocks>(shape, 64, Arrival{prompt, chunk_size, 3}, true) ==
              kNoDifference);
      }
    }
  }
}

TEST_CASE("blocks of any size are stage 1, bit for bit") {
  for (const AttentionShape& shape : kShapes) {
    for (const int block_size : {1, 3, 4, 16}) {
      for (const int prompt : {1, block_size, block_size + 1, 3 * block_size, 37}) {
        for (const int chunk_size : {prompt, 1, 7}) {
          CHECK(tests::compare_stages<Contiguous, Blocks>(shape, block_size, Arrival{prompt, chunk_size, 2}, true) ==
                kNoDifference);
        }
      }
    }
  }
}

TEST_CASE("a long context is stage 1, bit for bit") {
  CHECK(tests::compare_stages<Contiguous, Blocks>(AttentionShape{4, 2, 64, 1}, 16, Arrival{700, 256, 5}, true) ==
        kNoDifference);
}

TEST_CASE("logits through the engine are those of stage 1, bit for bit, on any number of threads") {
  for (const int num_threads : {1, 2, 3}) {
    const tests::ThreadCount threads(num_threads);
    for (const int chunk_size : {1, 3, 256}) {
      for (const int block_size : {1, 3, 16, 64}) {
        stage1::EngineOptions contiguous;
        contiguous.num_slots = 64;
        contiguous.chunk_size = chunk_size;
        stage2::EngineOptions blocks;
        blocks.num_slots = 64;
        blocks.chunk_size = chunk_size;
        blocks.block_size = block_size;
        CAPTURE(num_threads, chunk_size, block_size);
        CHECK(tests::compare_logits(tests::engine_logits<Blocks>(blocks, 21, 6),
                                    tests::engine_logits<Contiguous>(contiguous, 21, 6),
                                    std::nullopt) == kNoDifference);
      }
    }
  }
}
