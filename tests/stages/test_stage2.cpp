// Stage 2's own tests: gathering the blocks, and what it costs.
#include "tests/support/catch.h"

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/math/sampling.h"
#include "common/model/generation.h"
#include "stage2/attention.h"
#include "stage2/engine.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/attention_inputs.h"
#include "tests/support/compare.h"

using common::CheckError;
using common::Matrix;
using stage2::KvCache;
using stage2::KvCacheShape;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kBlockSize = 4;
constexpr int kNumBlocks = 8;

KvCacheShape small_shape() {
  KvCacheShape shape;
  shape.num_layers = 2;
  shape.num_blocks = kNumBlocks;
  shape.block_size = kBlockSize;
  shape.num_heads = 6;
  shape.num_kv_heads = 2;
  shape.head_dim = 5;
  return shape;
}

// A different float for each of its arguments.
float content(int layer, int position, int kv_head, int d, bool is_value) {
  return static_cast<float>((((layer * 100 + position) * 2 + kv_head) * 5 + d) * 2 + (is_value ? 1 : 0));
}

Matrix content_rows(int layer, int length, bool is_value) {
  return Matrix::NullaryExpr(length, 10, [=](Eigen::Index position, Eigen::Index column) {
    return content(layer, static_cast<int>(position), static_cast<int>(column) / 5, static_cast<int>(column) % 5,
                   is_value);
  });
}

// NaN everywhere but in the slots of positions 0 … length - 1 of a sequence with this block table.
KvCache filled_cache(const std::vector<int>& block_table, int length) {
  KvCache cache(small_shape());
  cache.fill(kNaN);
  std::vector<int> slots;
  for (int position = 0; position < length; ++position) {
    const int block = block_table[static_cast<std::size_t>(position / kBlockSize)];
    slots.push_back(block * kBlockSize + position % kBlockSize);
  }
  for (int layer = 0; layer < 2; ++layer) {
    cache.write(layer, slots, content_rows(layer, length, false), content_rows(layer, length, true));
  }
  return cache;
}

}  // namespace

TEST_CASE("gather copies the rows of block table [7, 1, 3] in the order of their positions") {
  const std::vector<int> block_table = {7, 1, 3};
  for (int length = 1; length <= 12; ++length) {
    const KvCache cache = filled_cache(block_table, length);
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 6; ++head) {
        CAPTURE(length, layer, head);
        const auto [k, v] = stage2::gather(cache, layer, head, block_table, length);
        // NaN differs from everything: a slot beyond the length, or of another block, cannot pass.
        CHECK(k == content_rows(layer, length, false).middleCols(Eigen::Index{head / 3} * 5, 5));
        CHECK(v == content_rows(layer, length, true).middleCols(Eigen::Index{head / 3} * 5, 5));
      }
    }
  }
}

TEST_CASE("gather reads no slot beyond the length: the rest of the last block and the other blocks hold NaN") {
  const std::vector<int> block_table = {7, 1, 3};
  for (int length = 1; length <= 12; ++length) {
    const KvCache cache = filled_cache(block_table, length);
    const stage2::HeadKv gathered = stage2::gather(cache, 0, 0, block_table, length);
    CAPTURE(length);
    CHECK(gathered.k.rows() == length);
    CHECK(gathered.v.rows() == length);
    CHECK(gathered.k.allFinite());
    CHECK(gathered.v.allFinite());
    // Slots reserved ahead are not read either.
    const stage2::HeadKv with_room = stage2::gather(cache, 0, 0, std::vector<int>{7, 1, 3, 0, 5}, length);
    CHECK(with_room.k == gathered.k);
    CHECK(with_room.v == gathered.v);
  }
}

TEST_CASE("gather sees what was written after the last gather") {
  const std::vector<int> block_table = {7, 1, 3};
  KvCache cache = filled_cache(block_table, 6);
  const Matrix before = stage2::gather(cache, 1, 5, block_table, 6).v;
  const std::vector<int> slot = {1 * kBlockSize + 1};  // position 5
  const Matrix row = Matrix::Constant(1, 10, -1.0F);
  cache.write(1, slot, row, row);
  const Matrix after = stage2::gather(cache, 1, 5, block_table, 6).v;
  CHECK(after.topRows(5) == before.topRows(5));
  CHECK(after.row(5) == Matrix::Constant(1, 5, -1.0F));
}

TEST_CASE("gather notices a block table that is too short, or leads out of the cache") {
  const KvCache cache = filled_cache({7, 1, 3}, 12);
  CHECK_NOTHROW(stage2::gather(cache, 0, 0, std::vector<int>{7, 1}, 8));
  CHECK_THROWS_AS(stage2::gather(cache, 0, 0, std::vector<int>{7, 1}, 9), CheckError);
  CHECK_THROWS_AS(stage2::gather(cache, 0, 0, std::vector<int>{7, kNumBlocks}, 8), CheckError);
  CHECK_THROWS_AS(stage2::gather(cache, 0, 0, std::vector<int>{7, -1}, 8), CheckError);
}

TEST_CASE("every forward pass copies all K and V of its sequence once: counted by hand") {
  // Prompt 5 in one pass, then two tokens: lengths after the passes 5, 6, 7.
  stage2::EngineOptions options;
  options.block_size = 4;
  stage2::Engine engine(tests::small_model(), options);
  const std::vector<common::Request> requests = {tests::make_request(5, 3)};
  engine.run(requests, [](int, common::Token) {});
  const auto bytes_per_token = static_cast<double>(engine.cache().shape().bytes_per_slot());
  CHECK(common::counter(engine.counters(), "kv_bytes_copied") / bytes_per_token == 5 + 6 + 7);
  CHECK(common::counter(engine.counters(), "kv_bytes_read") / bytes_per_token == 5 + 6 + 7);
  CHECK(engine.timing().prefill_tokens == 5);
  CHECK(engine.timing().decode_tokens == 2);  // the last token is drawn and never computed
}

TEST_CASE("at the end of a request, at most block_size - 1 slots are reserved and unused") {
  for (const int block_size : {1, 3, 4, 16}) {
    stage2::EngineOptions options;
    options.block_size = block_size;
    stage2::Engine engine(tests::small_model(), options);
    REQUIRE(engine.manager().allocate(0, 1));
    const std::vector<common::Token> tokens = tests::make_request(40, 1).prompt;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      REQUIRE(engine.append(0, std::span<const common::Token>(tokens).subspan(i, 1)).has_value());
      const stage2::Usage usage = engine.manager().usage();
      CAPTURE(block_size, i);
      CHECK(usage.used == static_cast<int>(i) + 1);
      CHECK(usage.reserved - usage.used < block_size);
    }
  }
}
