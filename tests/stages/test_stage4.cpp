// Stage 4's own tests: what is stored, and which query heads read it.
#include "tests/support/catch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
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
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kBlockSize = 4;

// The name says how many query heads share a kv head: 1, 3, 4, 8, and all of them.
constexpr std::array<AttentionShape, 6> kShapes = {
    {{4, 4, 8, 1}, {6, 2, 8, 1}, {8, 2, 20, 1}, {16, 2, 32, 1}, {5, 1, 8, 1}, {32, 1, 5, 1}}};

KvCacheShape cache_shape(const AttentionShape& shape, int num_blocks) {
  return tests::cache_shape_of<KvCacheShape>(shape, num_blocks, kBlockSize);
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

// The lesson's example: ten tokens in blocks 7, 1 and 3, with eight query heads on two kv heads. head_dim is the number
// of tokens. A value is 100 * kv head + position in all its dimensions; what is not written is NaN. Returns the first
// dimension of what each query head of the last num_queries gets: [num_queries, 8].
Matrix attend_to_ten_tokens(const Matrix& q, const Matrix& k, int num_queries) {
  const std::vector<int> block_table = {7, 1, 3};
  KvCache cache(cache_shape({8, 2, 10, 1}, 8));
  cache.fill(kNaN);
  const Matrix v = Matrix::NullaryExpr(10, 20, [](Eigen::Index position, Eigen::Index column) {
    const Eigen::Index kv_head = column / 10;
    return static_cast<float>(100 * kv_head + position);
  });
  cache.write(0, slots_of(block_table, 10), k, v);
  const Matrix output = stage4::attention(cache, 0, q.bottomRows(num_queries), block_table, 10);
  return Matrix::NullaryExpr(num_queries, 8,
                             [&](Eigen::Index query, Eigen::Index head) { return output(query, 10 * head); });
}

std::string number(float value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string row_name(int query, int position, int head) {
  return "query " + std::to_string(query) + " (at position " + std::to_string(position) + "), query head " +
         std::to_string(head);
}

}  // namespace

TEST_CASE("the cache stores each kv head once, dense inside its block") {
  const AttentionShape shape{6, 2, 5, 2};
  const KvCacheShape sizes = cache_shape(shape, 3);
  const KvCache cache(sizes);
  const float* origin = cache.keys(0, 0, 0, 1).data();
  CAPTURE(sizes.num_blocks, sizes.num_heads, sizes.num_kv_heads, sizes.block_size, sizes.head_dim);
  for (int layer = 0; layer < 2; ++layer) {
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      for (int slot = 0; slot < 12; ++slot) {
        // [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
        const int block = layer * 3 + slot / kBlockSize;
        const int row = (block * 2 + kv_head) * kBlockSize + slot % kBlockSize;
        CAPTURE(layer, kv_head, slot);
        const std::ptrdiff_t expected = std::ptrdiff_t{row} * 5;
        const std::ptrdiff_t key_offset = cache.keys(layer, kv_head, slot, 1).data() - origin;
        CHECK(key_offset == expected);
        const std::ptrdiff_t value_offset =
            cache.values(layer, kv_head, slot, 1).data() - cache.values(0, 0, 0, 1).data();
        CHECK(value_offset == expected);
      }
    }
  }
}

TEST_CASE("a write puts each kv head where its readers look, and touches nothing else") {
  // Layer 1 of 3: what goes beyond a block or a layer still lands in the cache, and is seen there.
  const AttentionShape shape{6, 2, 5, 3};
  KvCache cache(cache_shape(shape, 3));
  cache.fill(kNaN);
  Random random(1);
  const Matrix k = tests::random_matrix(2, 10, random);
  const Matrix v = tests::random_matrix(2, 10, random);
  const std::vector<int> slots = {11, 4};
  cache.write(1, slots, k, v);
  for (int layer = 0; layer < 3; ++layer) {
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      for (int slot = 0; slot < 12; ++slot) {
        CAPTURE(layer, kv_head, slot);
        const auto token = std::find(slots.begin(), slots.end(), slot) - slots.begin();
        const bool expected = layer == 1 && token < 2;
        const bool key_written = !cache.keys(layer, kv_head, slot, 1).hasNaN();
        CHECK(key_written == expected);
        const bool value_written = !cache.values(layer, kv_head, slot, 1).hasNaN();
        CHECK(value_written == expected);
        if (expected) {
          CHECK(cache.keys(1, kv_head, slot, 1) == k.middleCols(Eigen::Index{kv_head} * 5, 5).row(token));
          CHECK(cache.values(1, kv_head, slot, 1) == v.middleCols(Eigen::Index{kv_head} * 5, 5).row(token));
        }
      }
    }
  }
}

TEST_CASE("bytes of a slot count kv heads, not query heads") {
  for (const AttentionShape& shape : kShapes) {
    // K and V, layers, kv heads, head_dim, bytes of a float
    CHECK(cache_shape(shape, 1).bytes_per_slot() == std::int64_t{2} * shape.num_kv_heads * shape.head_dim * 4);
  }
  // The bundled model's shape: 6 layers, 8 query heads on 2 kv heads of 32 dimensions, 3 KiB a token.
  CHECK(cache_shape({8, 2, 32, 6}, 1).bytes_per_slot() == 3072);
  // 32 GiB: the product does not fit into 32 bits.
  CHECK(cache_shape({1024, 1024, 1024, 4096}, 1).bytes_per_slot() == std::int64_t{32} << 30);
}

TEST_CASE("query head h reads kv head h / group") {
  INFO("every value is the number of its kv head");
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
    for (const int num_queries : {1, 4, kLength}) {
      CAPTURE(shape.num_heads, shape.num_kv_heads, num_queries);
      const Matrix output = stage4::attention(cache, 0, inputs[0].q.bottomRows(num_queries), block_table, kLength);
      for (int head = 0; head < shape.num_heads; ++head) {
        const int kv_head = head / (shape.num_heads / shape.num_kv_heads);
        const Matrix part = output.middleCols(Eigen::Index{head} * shape.head_dim, shape.head_dim);
        CAPTURE(head, part(0, 0), kv_head);
        CHECK((part.array() - static_cast<float>(kv_head)).abs().maxCoeff() < 1e-4F);
      }
    }
  }
}

TEST_CASE("rows: each query head of each query finds what it asks for") {
  // The key of a position has a 1 in the dimension of that number, in kv head 1 counted from the end. A row's largest
  // score is with the position it asks for, which differs from row to row: 100 against 0.
  const auto dimension_of = [](int position, int kv_head) { return kv_head == 0 ? position : 9 - position; };
  const auto asks_for = [](int position, int head) { return (position + head) % (position + 1); };
  Matrix q = Matrix::Zero(10, 80);
  Matrix k = Matrix::Zero(10, 20);
  for (int position = 0; position < 10; ++position) {
    for (const int kv_head : {0, 1}) {
      k(position, 10 * kv_head + dimension_of(position, kv_head)) = 1.0F;
    }
    for (int head = 0; head < 8; ++head) {
      q(position, 10 * head + dimension_of(asks_for(position, head), head / 4)) = 100.0F * std::sqrt(10.0F);
    }
  }
  for (const int num_queries : {1, 2, 10}) {
    const Matrix found = attend_to_ten_tokens(q, k, num_queries);
    std::string difference;
    for (int query = 0; query < num_queries && difference.empty(); ++query) {
      for (int head = 0; head < 8 && difference.empty(); ++head) {
        const int position = 10 - num_queries + query;
        const int expected = 100 * (head / 4) + asks_for(position, head);
        if (!(std::abs(found(query, head) - static_cast<float>(expected)) < 1e-3F)) {
          difference = row_name(query, position, head) + " finds " + number(found(query, head)) + ", not " +
                       std::to_string(expected);
        }
      }
    }
    INFO("a value is 100 * kv head + position");
    CAPTURE(num_queries);
    CHECK(difference == kNoDifference);
  }
}

TEST_CASE("rows: all query heads of a query see the same tokens") {
  // All scores are 0, so that a row gets the mean of the positions it sees: 0 … n - 1 have the mean (n - 1) / 2.
  const Matrix q = Matrix::Zero(10, 80);
  const Matrix k = Matrix::Zero(10, 20);
  for (const int num_queries : {1, 2, 10}) {
    const Matrix means = attend_to_ten_tokens(q, k, num_queries);
    std::string difference;
    for (int query = 0; query < num_queries && difference.empty(); ++query) {
      for (int head = 0; head < 8 && difference.empty(); ++head) {
        const int position = 10 - num_queries + query;
        const int kv_head = head / 4;
        const float num_seen = 2.0F * (means(query, head) - static_cast<float>(100 * kv_head)) + 1.0F;
        if (!(std::abs(num_seen - static_cast<float>(position + 1)) < 1e-3F)) {
          difference = row_name(query, position, head) + " sees " + number(num_seen) + " tokens, not " +
                       std::to_string(position + 1);
        }
      }
    }
    CAPTURE(num_queries);
    CHECK(difference == kNoDifference);
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
    for (const int num_queries : {1, 4, 5, kLength}) {
      const Matrix q = inputs[0].q.bottomRows(num_queries);
      const std::vector<double> expected =
          tests::reference_attention(q, inputs[0].k, inputs[0].v, shape.num_heads, shape.num_kv_heads, shape.head_dim);
      const Matrix output = stage4::attention(cache, 0, q, block_table, kLength);
      CAPTURE(shape.num_heads, shape.num_kv_heads, num_queries);
      CHECK(tests::compare({output.data(), static_cast<std::size_t>(output.size())}, expected,
                           tests::rounding_tolerance(shape, kLength)) == kNoDifference);
    }
  }
}

TEST_CASE("heads, layers and slots that do not exist are noticed, and heads that do not divide") {
  const AttentionShape shape{6, 2, 5, 1};
  KvCache cache(cache_shape(shape, 3));
  const std::vector<int> slots = {0};
  CHECK_NOTHROW(cache.write(0, slots, Matrix::Zero(1, 10), Matrix::Zero(1, 10)));
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(1, 30), Matrix::Zero(1, 30)), CheckError);  // all query heads
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(1, 10), Matrix::Zero(1, 5)), CheckError);
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(2, 10), Matrix::Zero(2, 10)), CheckError);
  for (const int layer : {-1, 1}) {
    CHECK_THROWS_AS(cache.write(layer, slots, Matrix::Zero(1, 10), Matrix::Zero(1, 10)), CheckError);
  }
  for (const int slot : {-1, 12}) {
    CHECK_THROWS_AS(cache.write(0, std::vector<int>{slot}, Matrix::Zero(1, 10), Matrix::Zero(1, 10)), CheckError);
  }
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
