// The contract: what attention over the cache means, for every stage alike. Compiled once for each stage.
//
// Lengths lie on and around the block boundaries, where mistakes are made; a stage without blocks has to pass too.
// Everything is compared with tests/support/reference_attention.h, which computes in float64 from contiguous K and V.
#include "tests/support/catch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "tests/support/compare.h"
#include "tests/support/reference_attention.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

using common::Matrix;
using common::Random;
using tests::AttentionShape;
using tests::kUnitRoundoff;
using tests::PagedSequences;
using tests::rounding_tolerance;
using tests::TokenInputs;
using tests::Tolerance;

namespace {

// What the comparisons below return if all is well; a failing check then shows the difference instead.
const std::string kNoDifference;

constexpr std::array<int, 2> kBlockSizes = {4, 16};

// Compares head by head and position by position. Empty if all agree; otherwise where the first difference is.
std::string compare_heads(const AttentionShape& shape, const Matrix& actual, std::span<const double> expected,
                          Eigen::Index context_length, Tolerance tolerance) {
  if (actual.size() != static_cast<Eigen::Index>(expected.size())) {
    return common::format("the output is %td x %td, not %zu values", actual.rows(), actual.cols(), expected.size());
  }
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  const std::span<const float> values(actual.data(), expected.size());
  for (std::size_t first = 0; first < expected.size(); first += head_dim) {
    const std::string difference =
        tests::compare(values.subspan(first, head_dim), expected.subspan(first, head_dim), tolerance);
    if (!difference.empty()) {
      const auto row = static_cast<Eigen::Index>(first / head_dim) / shape.num_heads;
      const auto head = static_cast<int>(first / head_dim) % shape.num_heads;
      return common::format("query at position %td of %td, head %d: ", context_length - actual.rows() + row,
                            context_length, head) +
             difference;
    }
  }
  return "";
}

// Appends the tokens and compares every layer's output with the reference. Empty if all agree.
std::string append_and_compare(PagedSequences& sequences, int sequence, const TokenInputs& inputs) {
  const auto outputs = sequences.append(sequence, inputs);
  if (!outputs.has_value()) {
    return "no slots for the new tokens";
  }
  const AttentionShape& shape = sequences.shape();
  for (std::size_t layer = 0; layer < inputs.size(); ++layer) {
    const tests::LayerInput& written = sequences.written(sequence, static_cast<int>(layer));
    const std::vector<double> expected = tests::reference_attention(
        inputs[layer].q, written.k, written.v, shape.num_heads, shape.num_kv_heads, shape.head_dim);
    const Eigen::Index context_length = written.k.rows();
    const std::string difference =
        compare_heads(shape, (*outputs)[layer], expected, context_length, rounding_tolerance(shape, context_length));
    if (!difference.empty()) {
      return common::format("sequence %d, layer %zu, ", sequence, layer) + difference;
    }
  }
  return "";
}

// Appends num_tokens random tokens, chunk_size at a time. Empty if every output agreed with the reference.
std::string append_in_chunks(PagedSequences& sequences, int sequence, int num_tokens, int chunk_size, Random& random) {
  for (int first = 0; first < num_tokens; first += chunk_size) {
    const int count = std::min(chunk_size, num_tokens - first);
    std::string difference =
        append_and_compare(sequences, sequence, tests::random_inputs(sequences.shape(), count, random));
    if (!difference.empty()) {
      return difference;
    }
  }
  return "";
}

// The same for a sequence in a new cache that has just enough room for it.
std::string prefill(const AttentionShape& shape, int block_size, int length, int chunk_size) {
  PagedSequences sequences(shape, (length + block_size - 1) / block_size, block_size);
  Random random(static_cast<std::uint64_t>(length) * 1000 + static_cast<std::uint64_t>(chunk_size));
  if (!sequences.start(0, length)) {
    return "no slots for the first token";
  }
  return append_in_chunks(sequences, 0, length, chunk_size, random);
}

// Leaves the free slots in an order without pattern: fills the cache with one-block sequences, then frees them
// shuffled.
void shuffle_free_slots(PagedSequences& sequences, int num_blocks, int block_size, Random& random) {
  constexpr int kFirstId = 1000;
  std::vector<int> order;
  for (int i = 0; i < num_blocks; ++i) {
    REQUIRE(sequences.start(kFirstId + i, block_size));
    order.push_back(kFirstId + i);
  }
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[random.below(i)]);
  }
  for (const int sequence : order) {
    sequences.free(sequence);
  }
}

// One token, with zeros in q and K except for `query` in q's q_dimension and `key` in K's k_dimension, the same in all
// heads. V is random.
TokenInputs one_hot_token(const AttentionShape& shape, int q_dimension, float query, int k_dimension, float key,
                          Random& random) {
  TokenInputs inputs = tests::random_inputs(shape, 1, random);
  inputs[0].q.setZero();
  inputs[0].k.setZero();
  for (int head = 0; head < shape.num_heads; ++head) {
    inputs[0].q(0, head * shape.head_dim + q_dimension) = query;
  }
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    inputs[0].k(0, head * shape.head_dim + k_dimension) = key;
  }
  return inputs;
}

// Appends the token's rows below the rows of `all`, so that all can be appended as one chunk.
void stack(const TokenInputs& below, TokenInputs& all) {
  if (all.empty()) {
    all = below;
    return;
  }
  const auto add = [](const Matrix& rows, Matrix& matrix) {
    matrix.conservativeResize(matrix.rows() + rows.rows(), Eigen::NoChange);
    matrix.bottomRows(rows.rows()) = rows;
  };
  add(below[0].q, all[0].q);
  add(below[0].k, all[0].k);
  add(below[0].v, all[0].v);
}

// Empty if the query at each position p got the V of position targets[p], to the last bit: the weight there is 1, and
// the other weights are below 1e-38, so that they vanish when they are added.
std::string compare_with_targets(const AttentionShape& shape, const Matrix& output, const Matrix& v,
                                 const std::vector<int>& targets) {
  std::vector<double> expected;
  for (const int target : targets) {
    for (int head = 0; head < shape.num_heads; ++head) {
      const int kv_head = head / (shape.num_heads / shape.num_kv_heads);
      for (int d = 0; d < shape.head_dim; ++d) {
        expected.push_back(static_cast<double>(v(target, kv_head * shape.head_dim + d)));
      }
    }
  }
  return compare_heads(shape, output, expected, static_cast<Eigen::Index>(targets.size()), Tolerance{0.0, 0.0});
}

// Appends the rows of `all` in chunks and joins the outputs of layer 0.
Matrix append_rows_in_chunks(PagedSequences& sequences, int sequence, const TokenInputs& all, int chunk_size) {
  const auto length = static_cast<int>(all[0].q.rows());
  Matrix joined(all[0].q.rows(), all[0].q.cols());
  for (int first = 0; first < length; first += chunk_size) {
    const int count = std::min(chunk_size, length - first);
    const auto rows = [&](const Matrix& matrix) { return Matrix(matrix.middleRows(first, count)); };
    const auto outputs = sequences.append(sequence, {{rows(all[0].q), rows(all[0].k), rows(all[0].v)}});
    REQUIRE(outputs.has_value());
    joined.middleRows(first, count) = outputs->front();
  }
  return joined;
}

}  // namespace

TEST_CASE("lengths on and around the block boundaries, prefilled in chunks of any size") {
  const AttentionShape shape{4, 2, 32, 1};
  for (const int block_size : kBlockSizes) {
    for (const int length : {1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size}) {
      for (const int chunk_size : {length, 1, 2, 3, 7, block_size}) {
        CAPTURE(block_size, length, chunk_size);
        CHECK(prefill(shape, block_size, length, chunk_size) == kNoDifference);
      }
    }
  }
}

TEST_CASE("a block size of one, and a block that holds everything") {
  const AttentionShape shape{4, 2, 32, 1};
  for (const int chunk_size : {1, 3, 11}) {
    CAPTURE(chunk_size);
    CHECK(prefill(shape, 1, 11, chunk_size) == kNoDifference);
    CHECK(prefill(shape, 64, 11, chunk_size) == kNoDifference);
  }
}

TEST_CASE("head dimensions on and off the vector width, any number of query heads to a kv head") {
  constexpr std::array<std::array<int, 2>, 7> kHeads = {{{1, 1}, {3, 3}, {6, 2}, {3, 1}, {8, 2}, {8, 1}, {16, 2}}};
  for (const int head_dim : {1, 5, 20, 32, 33, 64}) {
    for (const auto& [num_heads, num_kv_heads] : kHeads) {
      const AttentionShape shape{num_heads, num_kv_heads, head_dim, 1};
      CAPTURE(head_dim, num_heads, num_kv_heads);
      CHECK(prefill(shape, 4, 9, 9) == kNoDifference);  // a prompt at once
      CHECK(prefill(shape, 4, 9, 1) == kNoDifference);  // token by token
      CHECK(prefill(shape, 4, 9, 4) == kNoDifference);
    }
  }
}

TEST_CASE("a long prompt, then one token at a time") {
  const AttentionShape shape{8, 2, 32, 1};
  constexpr int kBlockSize = 16;
  constexpr int kPrompt = 20 * kBlockSize;
  PagedSequences sequences(shape, 22, kBlockSize);
  Random random(5);
  REQUIRE(sequences.start(0, 22 * kBlockSize));
  CHECK(append_in_chunks(sequences, 0, kPrompt, 100, random) == kNoDifference);
  CHECK(append_in_chunks(sequences, 0, 2 * kBlockSize, 1, random) == kNoDifference);
}

TEST_CASE("sequences that grow in turn do not see each other, wherever their slots are") {
  constexpr int kNumSequences = 3;
  constexpr int kRounds = 12;
  for (const int block_size : kBlockSizes) {
    const int num_blocks = 3 * kNumSequences * kRounds / block_size + kNumSequences;
    PagedSequences sequences(AttentionShape{6, 2, 20, 1}, num_blocks, block_size);
    Random random(static_cast<std::uint64_t>(block_size));
    shuffle_free_slots(sequences, num_blocks, block_size, random);
    for (int sequence = 0; sequence < kNumSequences; ++sequence) {
      REQUIRE(sequences.start(sequence, 3 * kRounds));
    }
    for (int round = 0; round < kRounds; ++round) {
      for (int sequence = 0; sequence < kNumSequences; ++sequence) {
        CAPTURE(block_size, round, sequence);
        // 1 to 3 tokens at a time, so that the sequences reach their block boundaries in different rounds
        const int num_tokens = 1 + static_cast<int>(random.below(3));
        CHECK(append_in_chunks(sequences, sequence, num_tokens, num_tokens, random) == kNoDifference);
      }
    }
#if STAGE_NUMBER > 1
    // This proves something only if the slots of some sequence are out of order.
    bool out_of_order = false;
    for (int sequence = 0; sequence < kNumSequences; ++sequence) {
      const std::vector<int> slots = sequences.manager().slots(sequence, 0, sequences.manager().length(sequence));
      out_of_order = out_of_order || !std::is_sorted(slots.begin(), slots.end());
    }
    CHECK(out_of_order);
#endif
  }
}

TEST_CASE("slots are distinct, and hold to the bit what was written") {
  const AttentionShape shape{6, 3, 5, 2};
  constexpr int kNumBlocks = 12;
  constexpr int kBlockSize = 4;
  PagedSequences sequences(shape, kNumBlocks, kBlockSize);
  Random random(11);
  shuffle_free_slots(sequences, kNumBlocks, kBlockSize, random);
  constexpr std::array<int, 3> kLengths = {9, 4, 17};
  for (int sequence = 0; sequence < 3; ++sequence) {
    REQUIRE(sequences.start(sequence, kLengths[static_cast<std::size_t>(sequence)]));
  }
  for (int sequence = 0; sequence < 3; ++sequence) {
    REQUIRE(append_in_chunks(sequences, sequence, kLengths[static_cast<std::size_t>(sequence)], 5, random) ==
            kNoDifference);
  }

  std::vector<int> all_slots;
  for (int sequence = 0; sequence < 3; ++sequence) {
    const int length = sequences.manager().length(sequence);
    REQUIRE(length == kLengths[static_cast<std::size_t>(sequence)]);
    const std::vector<int> slots = sequences.manager().slots(sequence, 0, length);
    all_slots.insert(all_slots.end(), slots.begin(), slots.end());
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      const tests::LayerInput& written = sequences.written(sequence, layer);
      for (int position = 0; position < length; ++position) {
        for (int head = 0; head < shape.num_heads; ++head) {
          CAPTURE(sequence, layer, position, head);
          const int slot = slots[static_cast<std::size_t>(position)];
          const int kv_head = head / (shape.num_heads / shape.num_kv_heads);
          const int stored = tests::stored_head(shape, head);
          const auto count = static_cast<std::size_t>(shape.head_dim);
          const auto row_of = [&](const Matrix& matrix) {
            return std::span<const float>(matrix.row(position).data() + Eigen::Index{kv_head} * shape.head_dim, count);
          };
          CHECK(tests::compare_bits({sequences.cache().keys(layer, stored, slot, 1).data(), count},
                                    row_of(written.k)) == kNoDifference);
          CHECK(tests::compare_bits({sequences.cache().values(layer, stored, slot, 1).data(), count},
                                    row_of(written.v)) == kNoDifference);
        }
      }
    }
  }
  std::sort(all_slots.begin(), all_slots.end());
  CHECK(std::adjacent_find(all_slots.begin(), all_slots.end()) == all_slots.end());
  CHECK(all_slots.front() >= 0);
  CHECK(all_slots.back() < kNumBlocks * kBlockSize);
}

TEST_CASE("layers do not mix") {
  for (const int chunk_size : {13, 1, 3}) {
    CAPTURE(chunk_size);
    CHECK(prefill(AttentionShape{4, 2, 20, 3}, 4, 13, chunk_size) == kNoDifference);
  }
}

TEST_CASE("equal scores give the mean of what a query sees") {
  const AttentionShape shape{4, 2, 20, 1};
  constexpr int kLength = 13;
  for (const int chunk_size : {kLength, 1, 5}) {
    CAPTURE(chunk_size);
    PagedSequences sequences(shape, 4, 4);
    REQUIRE(sequences.start(0, kLength));
    TokenInputs inputs(1);
    inputs[0].q = Matrix::Ones(kLength, Eigen::Index{4} * 20);
    inputs[0].k = Matrix::Zero(kLength, Eigen::Index{2} * 20);
    inputs[0].v = Matrix::NullaryExpr(kLength, Eigen::Index{2} * 20,
                                      [](Eigen::Index position, Eigen::Index) { return static_cast<float>(position); });
    std::vector<double> expected;  // the mean of 0 … position
    for (int position = 0; position < kLength; ++position) {
      expected.insert(expected.end(), std::size_t{4} * 20, position / 2.0);
    }
    const Matrix output = append_rows_in_chunks(sequences, 0, inputs, chunk_size);
    // At most kLength products and sums of values up to kLength.
    const Tolerance tolerance{kLength * kLength * kUnitRoundoff, 0.0};
    CHECK(compare_heads(shape, output, expected, kLength, tolerance) == kNoDifference);
  }
}

TEST_CASE("huge scores pick one token and overflow nothing") {
  const AttentionShape shape{4, 2, 64, 1};
  constexpr float kHuge = 1e4F;  // a score is then 1e8 / sqrt(64), far beyond what exp() can take
  for (const int block_size : kBlockSizes) {
    const int length = 3 * block_size;  // below head_dim: each key has a dimension of its own
    Random random(3);
    TokenInputs inputs;
    std::vector<int> targets;
    for (int position = 0; position < length; ++position) {
      // Its own key, the first one, and some between: every query picks a token that it sees.
      targets.push_back(position % 3 == 0 ? position
                                          : static_cast<int>(random.below(static_cast<std::uint64_t>(position) + 1)));
      stack(one_hot_token(shape, targets.back(), kHuge, position, kHuge, random), inputs);
    }
    for (const int chunk_size : {length, 1, 7}) {
      CAPTURE(block_size, chunk_size);
      PagedSequences sequences(shape, 3, block_size);
      REQUIRE(sequences.start(0, length));
      const Matrix output = append_rows_in_chunks(sequences, 0, inputs, chunk_size);
      CHECK(compare_with_targets(shape, output, inputs[0].v, targets) == kNoDifference);
    }
  }
}

TEST_CASE("scores that are all far below zero still pick the largest") {
  const AttentionShape shape{4, 2, 64, 1};
  constexpr float kHuge = 1e4F;
  for (const int block_size : kBlockSizes) {
    const int length = 3 * block_size;
    // The best key is the first, in the middle of a block, or the last: the maximum is found early or late.
    for (const int best : {0, block_size + 1, length - 1}) {
      Random random(4);
      TokenInputs inputs;
      std::vector<int> targets;
      for (int position = 0; position < length; ++position) {
        const int distance = std::abs(position - best);
        targets.push_back(std::min(position, best));
        stack(one_hot_token(shape, 0, kHuge, 0, -kHuge * static_cast<float>(1 + distance), random), inputs);
      }
      for (const int chunk_size : {length, 1, 7}) {
        CAPTURE(block_size, best, chunk_size);
        PagedSequences sequences(shape, 3, block_size);
        REQUIRE(sequences.start(0, length));
        // A query after the best key picks that; one before it picks itself, the nearest that it sees.
        const Matrix output = append_rows_in_chunks(sequences, 0, inputs, chunk_size);
        CHECK(compare_with_targets(shape, output, inputs[0].v, targets) == kNoDifference);
      }
    }
  }
}

TEST_CASE("slots of a freed sequence serve the next, and nothing old is read") {
  constexpr int kBlockSize = 4;
  constexpr int kNumBlocks = 6;
  PagedSequences sequences(AttentionShape{4, 2, 20, 2}, kNumBlocks, kBlockSize);
  Random random(9);
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    // Together they need the whole cache, so every round has the same slots as the round before.
    const int first_length = 2 * kBlockSize + 1 + round % 4;
    const int second_length = 2 * kBlockSize + 1 + round / 4 % 4;
    REQUIRE(sequences.start(2 * round, first_length));
    REQUIRE(sequences.start(2 * round + 1, second_length));
    CHECK(append_in_chunks(sequences, 2 * round, first_length, 1 + round % 3, random) == kNoDifference);
    CHECK(append_in_chunks(sequences, 2 * round + 1, second_length, 4, random) == kNoDifference);
    sequences.free(2 * round);
    sequences.free(2 * round + 1);
    CHECK(sequences.manager().usage().used == 0);
    CHECK(sequences.manager().usage().reserved == 0);
  }
}

TEST_CASE("a full cache refuses, changes nothing, and has room again once a sequence ends") {
  constexpr int kBlockSize = 4;
  PagedSequences sequences(AttentionShape{4, 2, 20, 1}, 3, kBlockSize);
  Random random(10);
  REQUIRE(sequences.start(0, 2 * kBlockSize));
  REQUIRE(sequences.start(1, kBlockSize));
  CHECK(append_in_chunks(sequences, 0, 2 * kBlockSize - 1, 3, random) == kNoDifference);
  CHECK(append_in_chunks(sequences, 1, kBlockSize, kBlockSize, random) == kNoDifference);

  const stage::Usage before = sequences.manager().usage();
  CHECK_FALSE(sequences.start(2, 1));
  CHECK_FALSE(sequences.manager().contains(2));
  CHECK_FALSE(sequences.manager().reserve(0, 2));  // one slot is left for it
  CHECK_FALSE(sequences.manager().reserve(1, 1));
  CHECK(sequences.manager().length(0) == 2 * kBlockSize - 1);
  CHECK(sequences.manager().capacity(0) == 2 * kBlockSize);
  CHECK(sequences.manager().usage().used == before.used);
  CHECK(sequences.manager().usage().reserved == before.reserved);

  CHECK(append_in_chunks(sequences, 0, 1, 1, random) == kNoDifference);
  sequences.free(1);
  REQUIRE(sequences.start(2, kBlockSize));
  CHECK(append_in_chunks(sequences, 2, kBlockSize, 3, random) == kNoDifference);
}

TEST_CASE("a cache of more than 2^31 floats keeps its slots apart") {
  if (tests::kSanitized) {
    return;  // reserves more memory than a sanitizer's allocator hands out
  }
  // K and V are 8 GiB of addresses each; only the few pages that are written take memory.
  constexpr int kNumBlocks = 131073;
  constexpr int kBlockSize = 16;
  const AttentionShape shape{8, 8, 128, 1};
  INFO("the offset of the last slot is 2^31 floats or more, too large for an int");
  stage::KvCache cache(tests::cache_shape(shape, kNumBlocks, kBlockSize));
  const std::vector<int> slots = {0, kNumBlocks * kBlockSize / 2, kNumBlocks * kBlockSize - 1};
  Random random(12);
  const Matrix k = tests::random_matrix(3, Eigen::Index{8} * 128, random);
  const Matrix v = tests::random_matrix(3, Eigen::Index{8} * 128, random);
  cache.write(0, slots, k, v);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    for (int head = 0; head < 8; ++head) {
      CAPTURE(slots[i], head);
      const auto row = static_cast<Eigen::Index>(i);
      CHECK(cache.keys(0, head, slots[i], 1) == k.row(row).segment(Eigen::Index{head} * 128, 128));
      CHECK(cache.values(0, head, slots[i], 1) == v.row(row).segment(Eigen::Index{head} * 128, 128));
    }
  }
}

TEST_CASE("the cache takes and shows its own slots, layers and heads, and none beside them") {
  const AttentionShape shape{4, 2, 5, 2};
  constexpr int kNumBlocks = 3;
  constexpr int kBlockSize = 4;
  constexpr int kNumSlots = kNumBlocks * kBlockSize;
  stage::KvCache cache(tests::cache_shape(shape, kNumBlocks, kBlockSize));
  cache.fill(7.0F);
  const auto write = [&](int layer, int slot) {
    cache.write(layer, std::vector<int>{slot}, Matrix::Constant(1, 10, 1.0F), Matrix::Constant(1, 10, 2.0F));
  };
  const int num_stored = tests::stored_head(shape, shape.num_heads - 1) + 1;
  const auto check_views = [&](int layer, int head, int first_slot, int count) {
    CAPTURE(layer, head, first_slot, count);
    CHECK_THROWS_AS(cache.keys(layer, head, first_slot, count), common::CheckError);
    CHECK_THROWS_AS(cache.values(layer, head, first_slot, count), common::CheckError);
  };
  constexpr int kLargest = std::numeric_limits<int>::max();
  for (const int slot : {-1, kNumSlots, kNumSlots + 1, kLargest}) {
    CAPTURE(slot);
    CHECK_THROWS_AS(write(0, slot), common::CheckError);
    CHECK_THROWS_AS(write(shape.num_layers - 1, slot), common::CheckError);
    check_views(shape.num_layers - 1, num_stored - 1, slot, 1);
  }
  for (const int layer : {-1, shape.num_layers}) {
    CHECK_THROWS_AS(write(layer, 0), common::CheckError);
    check_views(layer, 0, 0, 1);
  }
  check_views(0, -1, 0, 1);
  check_views(0, num_stored, 0, 1);
  check_views(0, 0, 0, -1);
  check_views(0, 0, 1, kLargest);
  check_views(0, 0, kNumSlots - 1, 2);  // over the end of the storage
  check_views(0, 0, kNumSlots - kBlockSize, kBlockSize + 1);
  check_views(0, 0, kNumSlots, kBlockSize);  // a whole block behind it
#if STAGE_NUMBER > 1
  check_views(0, 0, kBlockSize - 1, 2);  // over the end of a block
#endif
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int head = 0; head < num_stored; ++head) {
      for (int slot = 0; slot < kNumSlots; ++slot) {
        CHECK(cache.keys(layer, head, slot, 1).isConstant(7.0F));
        CHECK(cache.values(layer, head, slot, 1).isConstant(7.0F));
      }
    }
  }
  write(shape.num_layers - 1, kNumSlots - 1);
  CHECK(cache.keys(shape.num_layers - 1, num_stored - 1, kNumSlots - 1, 1).isConstant(1.0F));
  CHECK(cache.values(shape.num_layers - 1, num_stored - 1, kNumSlots - 1, 1).isConstant(2.0F));
}

TEST_CASE("any order of starting, appending and freeing") {
  constexpr int kNumBlocks = 10;
  constexpr int kBlockSize = 4;
  constexpr int kMaxLength = 14;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(seed);
    PagedSequences sequences(AttentionShape{4, 2, 5, 2}, kNumBlocks, kBlockSize);
    Random random(seed);
    int num_refused = 0;
    int num_appended = 0;
    for (int operation = 0; operation < 600; ++operation) {
      CAPTURE(operation);
      const auto sequence = static_cast<int>(random.below(6));
      stage::KvCacheManager& manager = sequences.manager();
      if (!manager.contains(sequence)) {
        num_refused += sequences.start(sequence, kMaxLength) ? 0 : 1;
      } else if (random.below(12) == 0 || manager.length(sequence) == kMaxLength) {
        sequences.free(sequence);
      } else {
        const int room = kMaxLength - manager.length(sequence);
        const int count = std::min(room, 1 + static_cast<int>(random.below(5)));
        if (!manager.reserve(sequence, count)) {
          ++num_refused;
          sequences.free(sequence);
          continue;
        }
        REQUIRE(append_in_chunks(sequences, sequence, count, count, random) == kNoDifference);
        ++num_appended;
      }
    }
    // Both outcomes must have occurred, or the run has shown little.
    CHECK(num_refused > 5);
    CHECK(num_appended > 100);
  }
}
