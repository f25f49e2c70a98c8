// Stage 3's own tests: scores that make a running maximum hard, and memory that does not grow with the context.
#include "tests/support/catch.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "common/math/sampling.h"
#include "stage3/attention.h"
#include "tests/stages/heap_peak.h"
#include "tests/support/attention_inputs.h"
#include "tests/support/compare.h"
#include "tests/support/reference_attention.h"
#include "tests/support/thread_count.h"

using common::Matrix;
using common::Random;
using stage3::KvCache;
using stage3::KvCacheShape;
using tests::AttentionShape;

namespace {

const std::string kNoDifference;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr std::array<int, 4> kBlockSizes = {1, 3, 4, 16};

KvCacheShape cache_shape(const AttentionShape& shape, int num_blocks, int block_size) {
  return tests::cache_shape_of<KvCacheShape>(shape, num_blocks, block_size);
}

// K and V in blocks that lie from the last to the first, with one more block on either side; what is not written is
// NaN.
struct Blocks {
  KvCache cache;
  std::vector<int> block_table;
};

Blocks store(const AttentionShape& shape, int block_size, const Matrix& k, const Matrix& v) {
  const auto length = static_cast<int>(k.rows());
  const int num_blocks = (length + block_size - 1) / block_size;
  Blocks blocks{KvCache(cache_shape(shape, num_blocks + 2, block_size)), {}};
  blocks.cache.fill(kNaN);
  for (int block = num_blocks; block >= 1; --block) {
    blocks.block_table.push_back(block);
  }
  std::vector<int> slots;
  for (int position = 0; position < length; ++position) {
    const int block = blocks.block_table[static_cast<std::size_t>(position / block_size)];
    slots.push_back(block * block_size + position % block_size);
  }
  blocks.cache.write(0, slots, k, v);
  return blocks;
}

// One head of 4 dimensions, whose scores are exactly those given: q = (2, 0, 0, 0) is (1, 0, 0, 0) after the scaling by
// 1 / sqrt(4), and k = (score, 0, 0, 0). There is a query for each position, or for each of the last num_queries.
// Empty if the output agrees with the reference at every block size.
std::string check_scores(const std::vector<float>& scores, int num_queries) {
  const AttentionShape shape{1, 1, 4, 1};
  const auto length = static_cast<Eigen::Index>(scores.size());
  Random random(1);
  Matrix q = Matrix::Zero(num_queries, 4);
  q.col(0).setConstant(2.0F);
  Matrix k = Matrix::Zero(length, 4);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    k(static_cast<Eigen::Index>(i), 0) = scores[i];
  }
  const Matrix v = tests::random_matrix(length, 4, random);
  const std::vector<double> expected = tests::reference_attention(q, k, v, 1, 1, 4);
  for (const int block_size : kBlockSizes) {
    const Blocks blocks = store(shape, block_size, k, v);
    const Matrix output = stage3::attention(blocks.cache, 0, q, blocks.block_table, static_cast<int>(length));
    const std::string difference = tests::compare({output.data(), static_cast<std::size_t>(output.size())}, expected,
                                                  tests::rounding_tolerance(shape, length));
    if (!difference.empty()) {
      return "blocks of " + std::to_string(block_size) + ": " + difference;
    }
  }
  return "";
}

std::string check_scores(const std::vector<float>& scores) {
  const auto length = static_cast<int>(scores.size());
  for (const int num_queries : {1, 3, length}) {
    const std::string difference = check_scores(scores, num_queries);
    if (!difference.empty()) {
      return std::to_string(num_queries) + " queries, " + difference;
    }
  }
  return "";
}

template <typename Score>
std::vector<float> scores_of(int length, const Score& score) {
  std::vector<float> scores;
  scores.reserve(static_cast<std::size_t>(length));
  for (int position = 0; position < length; ++position) {
    scores.push_back(static_cast<float>(score(position)));
  }
  return scores;
}

}  // namespace

TEST_CASE("weights 1 and 3, computed by hand, in two blocks") {
  // exp(0) = 1 and exp(log 3) = 3: (1 * 1 + 3 * 5) / (1 + 3) = 4, whichever comes first.
  for (const bool larger_first : {false, true}) {
    Matrix k = Matrix::Zero(2, 4);
    k(larger_first ? 0 : 1, 0) = std::log(3.0F);
    Matrix v = Matrix::Constant(2, 4, 1.0F);
    v.row(larger_first ? 0 : 1).setConstant(5.0F);
    const Blocks blocks = store({1, 1, 4, 1}, 1, k, v);
    Matrix q = Matrix::Zero(1, 4);
    q(0, 0) = 2.0F;
    const Matrix output = stage3::attention(blocks.cache, 0, q, blocks.block_table, 2);
    CAPTURE(larger_first, output(0, 0));
    CHECK((output - Matrix::Constant(1, 4, 4.0F)).cwiseAbs().maxCoeff() < 1e-5F);
  }
}

TEST_CASE("equal scores of any size") {
  for (const float score : {0.0F, 1e4F, -1e4F, 1e-30F, 1e30F, -1e30F, kLowest, -kLowest}) {
    CAPTURE(score);
    CHECK(check_scores(scores_of(13, [&](int) { return score; })) == kNoDifference);
  }
}

TEST_CASE("every block raises the maximum, or none after the first, a little or a lot") {
  for (const double step : {1e-3, 0.5, 5.0, 40.0, 100.0, 1e4, 1e30}) {
    CAPTURE(step);
    CHECK(check_scores(scores_of(21, [&](int position) { return step * position; })) == kNoDifference);
    CHECK(check_scores(scores_of(21, [&](int position) { return -step * position; })) == kNoDifference);
    CHECK(check_scores(scores_of(21, [&](int position) { return step * (position - 20); })) == kNoDifference);
    CHECK(check_scores(scores_of(21, [&](int position) { return step * (position * 8 % 21); })) == kNoDifference);
  }
}

TEST_CASE("the largest score comes at any position, and what came before is scaled down, not forgotten") {
  for (int best = 0; best < 21; ++best) {
    for (const float raise : {1.0F, 3.0F, 10.0F, 1e4F}) {
      CAPTURE(best, raise);
      CHECK(check_scores(scores_of(21, [&](int position) {
              return 0.5F * static_cast<float>(position % 3) + (position == best ? raise : 0.0F);
            })) == kNoDifference);
    }
  }
}

TEST_CASE("first blocks whose scores are the lowest there are, or minus infinity") {
  for (const float low : {-1e4F, -1e30F, kLowest, -kInfinity}) {
    // Up to 19: across several blocks of each size but the largest, and into the middle of one.
    for (const int num_low : {1, 3, 4, 7, 16, 19}) {
      CAPTURE(low, num_low);
      const std::vector<float> scores =
          scores_of(21, [&](int position) { return position < num_low ? low : 0.25F * static_cast<float>(position); });
      // The last 1 or 2 queries see other scores as well; a query that sees nothing but -inf has no answer.
      CHECK(check_scores(scores, 1) == kNoDifference);
      CHECK(check_scores(scores, 2) == kNoDifference);
    }
  }
}

TEST_CASE("minus infinity among other scores: in the middle, in whole blocks, everywhere but once") {
  CHECK(check_scores(scores_of(21, [](int position) { return position % 2 == 1 ? -kInfinity : 1.0F; })) ==
        kNoDifference);
  CHECK(check_scores(scores_of(21, [](int position) {
          return position >= 4 && position < 16 ? -kInfinity : -1e4F + static_cast<float>(position);
        })) == kNoDifference);
  for (int best = 0; best < 21; ++best) {
    CAPTURE(best);
    CHECK(check_scores(scores_of(21, [&](int position) { return position == best ? -1e4F : -kInfinity; }), 1) ==
          kNoDifference);
  }
}

TEST_CASE("a query of a chunk sees nothing after itself, whatever stands there") {
  // Each position's score is far above all earlier ones: a query that saw the next one would return its V.
  const AttentionShape shape{1, 1, 4, 1};
  constexpr int kLength = 21;
  Random random(2);
  Matrix q = Matrix::Zero(kLength, 4);
  q.col(0).setConstant(2.0F);
  Matrix k = Matrix::Zero(kLength, 4);
  for (int position = 0; position < kLength; ++position) {
    k(position, 0) = 200.0F * static_cast<float>(position);
  }
  const Matrix v = tests::random_matrix(kLength, 4, random);
  for (const int block_size : kBlockSizes) {
    const Blocks blocks = store(shape, block_size, k, v);
    for (const int num_queries : {1, 2, 5, kLength}) {
      const Matrix output = stage3::attention(blocks.cache, 0, q.topRows(num_queries), blocks.block_table, kLength);
      CAPTURE(block_size, num_queries);
      // The weights of all but the newest token that a query sees are below 1e-38, and vanish when added.
      CHECK(output == v.bottomRows(num_queries));
    }
  }
}

TEST_CASE("the output does not depend on the number of threads") {
  const AttentionShape shape{6, 3, 20, 1};
  Random random(3);
  const tests::TokenInputs inputs = tests::random_inputs(shape, 70, random);
  const Blocks blocks = store(shape, 16, inputs[0].k, inputs[0].v);
  Matrix expected;
  for (const int num_threads : {1, 2, 4, 7}) {
    const tests::ThreadCount threads(num_threads);
    const Matrix output = stage3::attention(blocks.cache, 0, inputs[0].q, blocks.block_table, 70);
    expected = num_threads == 1 ? output : expected;
    CAPTURE(num_threads);
    CHECK(output == expected);
  }
}

#ifdef TESTS_HEAP_PEAK
TEST_CASE("no buffer grows with the context") {
  const AttentionShape shape{4, 4, 32, 1};
  constexpr int kShort = 256;
  constexpr int kLong = 8192;
  Random random(4);
  const tests::TokenInputs inputs = tests::random_inputs(shape, kLong, random);
  const Blocks blocks = store(shape, 16, inputs[0].k, inputs[0].v);
  // One float for each position of one head: the least that a buffer over the context could take.
  constexpr std::ptrdiff_t kSmallestGrowth = (kLong - kShort) * std::ptrdiff_t{sizeof(float)};
  CHECK(tests::heap_peak([] { const Matrix buffer = Matrix::Ones(1, kLong - kShort); }) >= kSmallestGrowth);
  for (const int num_queries : {1, 8}) {
    const Matrix q = inputs[0].q.topRows(num_queries);
    const auto peak = [&](int context_length) {
      return tests::heap_peak([&] { stage3::attention(blocks.cache, 0, q, blocks.block_table, context_length); });
    };
    peak(kShort);  // whatever is set up once
    const std::ptrdiff_t peak_short = peak(kShort);
    CAPTURE(num_queries, peak_short);
    CHECK(peak(kLong) < peak_short + kSmallestGrowth / 2);
  }
}
#endif
