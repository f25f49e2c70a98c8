// Stage 4's own tests: what is stored, and which query heads read it.
#include "tests/support/catch.h"

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/math/sampling.h"
#include "common/model/generation.h"
#include "stage4/attention.h"
#include "stage4/engine.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/attention_inputs.h"
#include "tests/support/compare.h"
#include "tests/support/reference_attention.h"

using common::CheckError;
using common::Matrix;
using common::Random;
using stage4::KvCache;
using stage4::KvCacheShape;
using stage4::SoftmaxMode;
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kBlockSize = 4;
constexpr std::array<SoftmaxMode, 2> kModes = {SoftmaxMode::kOnline, SoftmaxMode::kSafe};

// As many query heads to a kv head as the name says: 1, 3, 4, 8, and all of them.
constexpr std::array<AttentionShape, 6> kShapes = {
    {{4, 4, 8, 1}, {6, 2, 8, 1}, {8, 2, 20, 1}, {16, 2, 32, 1}, {5, 1, 8, 1}, {32, 1, 5, 1}}};

KvCacheShape cache_shape(const AttentionShape& shape, int num_blocks) {
  KvCacheShape result;
  result.num_layers = shape.num_layers;
  result.num_blocks = num_blocks;
  result.block_size = kBlockSize;
  result.num_heads = shape.num_heads;
  result.num_kv_heads = shape.num_kv_heads;
  result.head_dim = shape.head_dim;
  return result;
}

// Slots of positions 0 … length - 1 in the blocks of the table.
std::vector<int> slots_of(const std::vector<int>& block_table, int length) {
  std::vector<int> slots;
  for (int position = 0; position < length; ++position) {
    const int block = block_table[static_cast<std::size_t>(position / kBlockSize)];
    slots.push_back(block * kBlockSize + position % kBlockSize);
  }
  return slots;
}

}  // namespace

TEST_CASE("the cache stores each kv head once, dense inside its block") {
  const AttentionShape shape{6, 2, 5, 2};
  const KvCache cache(cache_shape(shape, 3));
  const float* origin = cache.keys(0, 0, 0, 1).data();
  for (int layer = 0; layer < 2; ++layer) {
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      for (int slot = 0; slot < 12; ++slot) {
        // [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
        const int block = layer * 3 + slot / kBlockSize;
        const int row = (block * 2 + kv_head) * kBlockSize + slot % kBlockSize;
        CAPTURE(layer, kv_head, slot);
        CHECK(cache.keys(layer, kv_head, slot, 1).data() - origin == Eigen::Index{row} * 5);
        CHECK(cache.values(layer, kv_head, slot, 1).data() - cache.values(0, 0, 0, 1).data() == Eigen::Index{row} * 5);
      }
    }
  }
}

TEST_CASE("a write puts each kv head where its readers look, and touches nothing else") {
  const AttentionShape shape{6, 2, 5, 2};
  KvCache cache(cache_shape(shape, 3));
  cache.fill(kNaN);
  Random random(1);
  const Matrix k = tests::random_matrix(2, 10, random);
  const Matrix v = tests::random_matrix(2, 10, random);
  const std::vector<int> slots = {11, 4};
  cache.write(1, slots, k, v);
  for (int kv_head = 0; kv_head < 2; ++kv_head) {
    for (int row = 0; row < 2; ++row) {
      const int slot = slots[static_cast<std::size_t>(row)];
      CAPTURE(kv_head, slot);
      CHECK(cache.keys(1, kv_head, slot, 1) == k.middleCols(Eigen::Index{kv_head} * 5, 5).row(row));
      CHECK(cache.values(1, kv_head, slot, 1) == v.middleCols(Eigen::Index{kv_head} * 5, 5).row(row));
    }
    for (int slot = 0; slot < 12; ++slot) {
      const bool written = slot == 11 || slot == 4;
      CAPTURE(kv_head, slot);
      CHECK(cache.keys(1, kv_head, slot, 1).hasNaN() == !written);
      CHECK(cache.values(0, kv_head, slot, 1).hasNaN());
    }
  }
}

TEST_CASE("bytes of a slot count kv heads, not query heads") {
  for (const AttentionShape& shape : kShapes) {
    // K and V, layers, kv heads, head_dim, bytes of a float
    CHECK(cache_shape(shape, 1).bytes_per_slot() == std::int64_t{2} * shape.num_kv_heads * shape.head_dim * 4);
  }
  // The bundled model's shape: 4 layers, 12 query heads on 3 kv heads of 32 dimensions, 3 KiB a token.
  CHECK(cache_shape({12, 3, 32, 4}, 1).bytes_per_slot() == 3072);
}

TEST_CASE("query head h reads kv head h / group") {
  constexpr int kLength = 11;
  const std::vector<int> block_table = {2, 0, 3};
  for (const AttentionShape& shape : kShapes) {
    // V is the kv head's number everywhere, so that whatever the weights are, the output names the head that was read.
    KvCache cache(cache_shape(shape, 4));
    cache.fill(kNaN);
    Random random(2);
    const tests::TokenInputs inputs = tests::random_inputs(shape, kLength, random);
    const Matrix v = Matrix::NullaryExpr(kLength, inputs[0].v.cols(), [&](Eigen::Index, Eigen::Index column) {
      const Eigen::Index kv_head = column / shape.head_dim;
      return static_cast<float>(kv_head);
    });
    cache.write(0, slots_of(block_table, kLength), inputs[0].k, v);
    for (const SoftmaxMode mode : kModes) {
      for (const int num_queries : {1, 4, kLength}) {
        const Matrix output =
            stage4::attention(cache, 0, inputs[0].q.bottomRows(num_queries), block_table, kLength, mode);
        for (int head = 0; head < shape.num_heads; ++head) {
          const int kv_head = head / (shape.num_heads / shape.num_kv_heads);
          const Matrix part = output.middleCols(Eigen::Index{head} * shape.head_dim, shape.head_dim);
          CAPTURE(shape.num_heads, shape.num_kv_heads, num_queries, head);
          CHECK((part.array() - static_cast<float>(kv_head)).abs().maxCoeff() < 1e-4F);
        }
      }
    }
  }
}

TEST_CASE("random K and V in every head: groups of 1, 3, 4, 8 and all agree with the reference") {
  constexpr int kLength = 11;
  const std::vector<int> block_table = {2, 0, 3};
  for (const AttentionShape& shape : kShapes) {
    KvCache cache(cache_shape(shape, 4));
    cache.fill(kNaN);
    Random random(3);
    const tests::TokenInputs inputs = tests::random_inputs(shape, kLength, random);
    cache.write(0, slots_of(block_table, kLength), inputs[0].k, inputs[0].v);
    for (const SoftmaxMode mode : kModes) {
      for (const int num_queries : {1, 4, 5, kLength}) {
        const Matrix q = inputs[0].q.bottomRows(num_queries);
        const std::vector<double> expected = tests::reference_attention(q, inputs[0].k, inputs[0].v, shape.num_heads,
                                                                        shape.num_kv_heads, shape.head_dim);
        const Matrix output = stage4::attention(cache, 0, q, block_table, kLength, mode);
        CAPTURE(shape.num_heads, shape.num_kv_heads, num_queries);
        CHECK(tests::compare({output.data(), static_cast<std::size_t>(output.size())}, expected,
                             tests::rounding_tolerance(shape, kLength)) == kNoDifference);
      }
    }
  }
}

TEST_CASE("heads that do not exist or do not divide are noticed") {
  const AttentionShape shape{6, 2, 5, 1};
  KvCache cache(cache_shape(shape, 3));
  const std::vector<int> slots = {0};
  CHECK_NOTHROW(cache.write(0, slots, Matrix::Zero(1, 10), Matrix::Zero(1, 10)));
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(1, 30), Matrix::Zero(1, 30)), CheckError);  // all query heads
  CHECK_THROWS_AS(KvCache(cache_shape({6, 4, 5, 1}, 3)), CheckError);
  CHECK_THROWS_AS(KvCache(cache_shape({6, 0, 5, 1}, 3)), CheckError);
}

TEST_CASE("the engine's counters: bytes of a token fall by the group") {
  // The small model has 2 query heads to a kv head: 2 layers, 2 kv heads of 8 dimensions.
  stage4::Engine engine(tests::small_model(), stage4::EngineOptions());
  const std::vector<common::Request> requests = {tests::make_request(5, 3)};
  engine.run(requests, [](int, common::Token) {});
  const double bytes_per_token = 2.0 * 2 * 2 * 8 * 4;
  CHECK(common::counter(engine.counters(), "kv_bytes_per_token") == bytes_per_token);
  CHECK(common::counter(engine.counters(), "kv_bytes_read") == (5 + 6 + 7) * bytes_per_token);
}
