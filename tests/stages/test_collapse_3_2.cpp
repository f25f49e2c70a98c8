// Stage 3 computes what stage 2 computes: to the last bit while there is one block, and within rounding beyond.
//
// With one block there is nothing to rescale: the only weights are formed with the largest of all scores, and added in
// the same order. With more blocks the sums are added block by block and multiplied by exp(earlier - later maximum),
// so that the last digits differ; tests/support/attention_inputs.h derives by how much they may.
#include "tests/support/catch.h"

#include <array>
#include <string>

#include "stage2/attention.h"
#include "stage2/engine.h"
#include "stage3/attention.h"
#include "stage3/engine.h"
#include "tests/stages/collapse.h"

using tests::Arrival;
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

TESTS_STAGE(Gathered, stage2);
TESTS_STAGE(Streamed, stage3);

constexpr std::array<AttentionShape, 6> kShapes = {
    {{1, 1, 5, 1}, {4, 2, 32, 1}, {3, 1, 33, 1}, {8, 8, 64, 1}, {6, 2, 1, 2}, {8, 1, 20, 1}}};

}  // namespace

TEST_CASE("one block that the sequence fills is stage 2, bit for bit") {
  for (const AttentionShape& shape : kShapes) {
    for (const int prompt : {1, 2, 5, 16, 17, 40}) {
      CHECK(tests::compare_stages<Gathered, Streamed>(shape, prompt, Arrival{prompt, prompt, 0}, true) ==
            kNoDifference);
    }
  }
}

TEST_CASE("one block with room to spare is stage 2, bit for bit") {
  for (const AttentionShape& shape : kShapes) {
    for (const int prompt : {1, 2, 5, 15, 16, 17, 40}) {
      for (const int chunk_size : {prompt, 1, 7}) {
        CHECK(tests::compare_stages<Gathered, Streamed>(shape, 64, Arrival{prompt, chunk_size, 3}, true) ==
              kNoDifference);
      }
    }
  }
}

TEST_CASE("many blocks are stage 2, within rounding") {
  for (const AttentionShape& shape : kShapes) {
    for (const int block_size : {1, 3, 4, 16}) {
      for (const int prompt : {1, block_size + 1, 3 * block_size, 37}) {
        for (const int chunk_size : {prompt, 1, 7}) {
          CHECK(tests::compare_stages<Gathered, Streamed>(shape, block_size, Arrival{prompt, chunk_size, 2}, false) ==
                kNoDifference);
        }
      }
    }
  }
}

TEST_CASE("a long context is stage 2, within rounding") {
  CHECK(tests::compare_stages<Gathered, Streamed>(AttentionShape{4, 2, 64, 1}, 16, Arrival{700, 256, 5}, false) ==
        kNoDifference);
}

TEST_CASE("logits through the engine are those of stage 2, within rounding") {
  stage2::EngineOptions gathered;
  stage3::EngineOptions streamed;
  for (const int block_size : {1, 3, 16, 64}) {
    gathered.block_size = block_size;
    streamed.block_size = block_size;
    CAPTURE(block_size);
    // Logits of this model have size 1; two layers of float32 sums of up to 48 terms keep five digits and more.
    CHECK(tests::compare_logits(tests::engine_logits<Streamed>(streamed, 21, 6),
                                tests::engine_logits<Gathered>(gathered, 21, 6),
                                tests::Tolerance{1e-5, 1e-5}) == kNoDifference);
  }
}
