// Stage 4 computes what stage 3 computes: to the last bit with a kv head for every query head, and within rounding
// when query heads share one. Stage 3 is given the same K and V, and repeats them for each query head.
#include "tests/support/catch.h"

#include <array>
#include <string>
#include <vector>

#include "stage3/attention.h"
#include "stage3/engine.h"
#include "stage4/attention.h"
#include "stage4/engine.h"
#include "tests/stages/collapse.h"

using tests::Arrival;
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

TESTS_STAGE(Repeated, stage3);
TESTS_STAGE(Grouped, stage4);

constexpr std::array<AttentionShape, 5> kOneToOne = {
    {{1, 1, 5, 1}, {4, 4, 32, 1}, {3, 3, 33, 1}, {8, 8, 64, 1}, {6, 6, 1, 2}}};
constexpr std::array<AttentionShape, 6> kShared = {
    {{2, 1, 5, 1}, {4, 2, 32, 1}, {3, 1, 33, 1}, {16, 2, 64, 1}, {6, 2, 1, 2}, {8, 1, 20, 1}}};
constexpr std::array<int, 5> kBlockSizes = {1, 3, 4, 16, 64};

std::string compare(const AttentionShape& shape, int block_size, const Arrival& arrival, bool bits) {
  return tests::compare_stages<Repeated, Grouped>(shape, block_size, arrival, bits);
}

}  // namespace

TEST_CASE("a kv head for every query head is stage 3, bit for bit") {
  for (const AttentionShape& shape : kOneToOne) {
    for (const int block_size : kBlockSizes) {
      for (const int chunk_size : {37, 1, 7}) {
        CHECK(compare(shape, block_size, Arrival{37, chunk_size, 2}, true) == kNoDifference);
      }
    }
  }
}

TEST_CASE("query heads that share a kv head get what repeated K and V give, within rounding") {
  for (const AttentionShape& shape : kShared) {
    for (const int block_size : kBlockSizes) {
      for (const int chunk_size : {37, 1, 7}) {
        CHECK(compare(shape, block_size, Arrival{37, chunk_size, 2}, false) == kNoDifference);
      }
    }
  }
}

TEST_CASE("bytes of a token fall by exactly the number of query heads to a kv head") {
  for (const auto& shapes : {std::vector<AttentionShape>(kOneToOne.begin(), kOneToOne.end()),
                             std::vector<AttentionShape>(kShared.begin(), kShared.end())}) {
    for (const AttentionShape& shape : shapes) {
      CHECK(tests::cache_shape_of<stage3::KvCacheShape>(shape, 1, 1).bytes_per_slot() ==
            tests::cache_shape_of<stage4::KvCacheShape>(shape, 1, 1).bytes_per_slot() *
                (shape.num_heads / shape.num_kv_heads));
    }
  }
}

TEST_CASE("a long context is stage 3, within rounding") {
  CHECK(compare(AttentionShape{8, 2, 64, 1}, 16, Arrival{700, 256, 5}, false) == kNoDifference);
}

TEST_CASE("logits through the engine are those of stage 3, within rounding") {
  for (const int block_size : {1, 3, 16, 64}) {
    stage3::EngineOptions repeated;
    repeated.block_size = block_size;
    stage4::EngineOptions grouped;
    grouped.block_size = block_size;
    CAPTURE(block_size);
    // Logits of this model have size 1; two layers of float32 sums of up to 48 terms keep five digits and more.
    CHECK(tests::compare_logits(tests::engine_logits<Grouped>(grouped, 21, 6),
                                tests::engine_logits<Repeated>(repeated, 21, 6),
                                tests::Tolerance{1e-5, 1e-5}) == kNoDifference);
  }
}
