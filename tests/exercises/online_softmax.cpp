// Online softmax by itself, first one step of it and then the loop over blocks, in the numbers of the lesson: scores in
// units of ln 2, so that weights are powers of two, and the value of a token is its position.
#include "tests/support/catch.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "common/base/tensor.h"
#include "stage3/attention.h"
#include "stage3/kv_cache.h"
#include "tests/support/thread_count.h"

namespace {

using stage3::OnlineSoftmax;

const std::string kAsExpected;

// Empty if the value is right, and otherwise what it is and what it should be. Sums of ten terms in float32: rounding
// is a hundred times smaller than what is allowed, any wrong weight a thousand times larger.
std::string compare(const std::string& name, double value, double expected) {
  if (std::abs(value - expected) <= 1e-4) {
    return "";
  }
  std::ostringstream difference;
  difference << name << " is " << value << ", not " << expected;
  return difference.str();
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kLn2 = std::log(2.0F);

// Values are the positions from `first` on: one column.
void add_block(OnlineSoftmax& softmax, int first_row, const common::Matrix& scores, int first) {
  common::Matrix values(scores.cols(), 1);
  for (Eigen::Index i = 0; i < values.rows(); ++i) {
    values(i, 0) = static_cast<float>(first + i);
  }
  common::Matrix weights = scores * kLn2;
  softmax.add(first_row, weights, common::MatrixView(values.data(), values.rows(), 1));
}

common::Matrix row(std::vector<float> scores) {
  return Eigen::Map<common::Matrix>(scores.data(), 1, static_cast<Eigen::Index>(scores.size()));
}

// Empty if this row holds what it should, with the maximum in units of ln 2.
std::string compare_row(const OnlineSoftmax& softmax, int row, double maximum, double sum, double output) {
  const std::string name = "[" + std::to_string(row) + "]";
  std::string all;
  for (const std::string& difference : {compare("row_max" + name + " / ln 2", softmax.row_max(row) / kLn2, maximum),
                                        compare("row_sum" + name, softmax.row_sum(row), sum),
                                        compare("output" + name, softmax.output(row, 0), output)}) {
    all += (all.empty() || difference.empty() ? "" : "; ") + difference;
  }
  return all;
}

const std::vector<float> kScores = {1, 0, 2, 1, 3, 1, 0, 2, 2, 4};
const std::vector<int> kBlockTable = {7, 1, 3};

const std::string kUnwritten = "slots that hold no token hold NaN";

// A cache in which the ten tokens lie in these blocks of 4, with keys and values of all heads in a row each.
stage3::KvCache cache_of(int num_heads, int head_dim, const common::Matrix& keys, const common::Matrix& values) {
  stage3::KvCacheShape shape;
  shape.num_layers = 1;
  shape.num_blocks = 8;
  shape.block_size = 4;
  shape.num_heads = num_heads;
  shape.num_kv_heads = num_heads;
  shape.head_dim = head_dim;
  stage3::KvCache cache(shape);
  cache.fill(std::numeric_limits<float>::quiet_NaN());
  std::vector<int> slots;
  slots.reserve(static_cast<std::size_t>(keys.rows()));
  for (int i = 0; i < keys.rows(); ++i) {
    slots.push_back(kBlockTable[static_cast<std::size_t>(i / 4)] * 4 + i % 4);
  }
  cache.write(0, slots, keys, values);
  return cache;
}

// Attention of the last num_queries of the ten tokens: a key is a score, and every query is 1.
common::Matrix attend(int num_queries) {
  const int count = static_cast<int>(kScores.size());
  common::Matrix keys(count, 1);
  common::Matrix values(count, 1);
  for (int i = 0; i < count; ++i) {
    keys(i, 0) = kScores[static_cast<std::size_t>(i)] * kLn2;
    values(i, 0) = static_cast<float>(i);
  }
  const stage3::KvCache cache = cache_of(1, 1, keys, values);
  return stage3::attention(cache, 0, common::Matrix::Ones(num_queries, 1), kBlockTable, count);
}

// All at once, with nothing taken out: what the query at this position sees.
double softmax_up_to(int position) {
  double sum = 0;
  double output = 0;
  for (int i = 0; i <= position; ++i) {
    const double weight = std::exp2(static_cast<double>(kScores[static_cast<std::size_t>(i)]));
    sum += weight;
    output += weight * i;
  }
  return output / sum;
}

}  // namespace

TEST_CASE("online softmax: ten tokens in three blocks, by hand") {
  OnlineSoftmax softmax(1, 1);
  add_block(softmax, 0, row({1, 0, 2, 1}), 0);
  const std::string after_block_7 = compare_row(softmax, 0, 2, 2.25, 3.75);
  CHECK(after_block_7 == kAsExpected);
  add_block(softmax, 0, row({3, 1, 0, 2}), 4);
  const std::string after_block_1 = compare_row(softmax, 0, 3, 3, 11.375);
  CHECK(after_block_1 == kAsExpected);
  add_block(softmax, 0, row({2, 4}), 8);
  const std::string after_block_3 = compare_row(softmax, 0, 4, 2.75, 16.6875);
  CHECK(after_block_3 == kAsExpected);
}

TEST_CASE("online softmax: a block without a larger score rescales nothing") {
  OnlineSoftmax softmax(1, 1);
  add_block(softmax, 0, row({5}), 7);
  const std::string after_score_5 = compare_row(softmax, 0, 5, 1, 7);
  CHECK(after_score_5 == kAsExpected);
  add_block(softmax, 0, row({4, 5}), 8);
  const std::string after_scores_4_and_5 = compare_row(softmax, 0, 5, 2.5, 7 + 4 + 9);
  CHECK(after_scores_4_and_5 == kAsExpected);
}

TEST_CASE("online softmax: rows before first_row are left alone, and each row has its own maximum") {
  OnlineSoftmax softmax(3, 1);
  common::Matrix scores(3, 1);
  scores << 0, 1, 2;
  add_block(softmax, 0, scores, 1);
  scores.resize(2, 1);
  scores << 3, 1;
  const int first_row = 1;
  add_block(softmax, first_row, scores, 10);
  CAPTURE(first_row);
  CHECK(compare_row(softmax, 0, 0, 1, 1) == kAsExpected);
  CHECK(compare_row(softmax, 1, 3, 1.25, 10.25) == kAsExpected);
  CHECK(compare_row(softmax, 2, 2, 1.5, 1 + 5) == kAsExpected);
}

TEST_CASE("online softmax: a score of minus infinity has no weight") {
  OnlineSoftmax softmax(1, 1);
  add_block(softmax, 0, row({2, -kInfinity}), 3);
  CHECK(compare_row(softmax, 0, 2, 1, 3) == kAsExpected);
}

TEST_CASE("reading blocks: the last of ten tokens in blocks [7, 1, 3], by hand") {
  INFO(kUnwritten);
  CHECK(compare("the result", attend(1)(0, 0), 16.6875 / 2.75) == kAsExpected);
}

TEST_CASE("reading blocks: each query of a chunk sees what comes before it and itself, and no slot behind the end") {
  INFO(kUnwritten);
  for (int num_queries = 1; num_queries <= 10; ++num_queries) {
    CAPTURE(num_queries);
    const common::Matrix output = attend(num_queries);
    REQUIRE(output.rows() == num_queries);
    for (int query = 0; query < num_queries; ++query) {
      const int position = 10 - num_queries + query;
      CAPTURE(query, position);
      CHECK(compare("the result", output(query, 0), softmax_up_to(position)) == kAsExpected);
    }
  }
}

TEST_CASE("reading blocks: two heads of 4 dimensions, with queries that are divided by 2") {
  // A query is (2, 0, 0, 0), so (1, 0, 0, 0) when it has been divided by sqrt(4); the first dimension of a key is the
  // score. Head 1 sees the same scores, and values ten times as large.
  const auto count = static_cast<int>(kScores.size());
  common::Matrix keys = common::Matrix::Zero(count, 8);
  common::Matrix values = common::Matrix::Zero(count, 8);
  for (int i = 0; i < count; ++i) {
    for (const int head : {0, 1}) {
      keys(i, 4 * head) = kScores[static_cast<std::size_t>(i)] * kLn2;
      values(i, 4 * head) = static_cast<float>(i * (head == 0 ? 1 : 10));
    }
  }
  INFO(kUnwritten);
  const stage3::KvCache cache = cache_of(2, 4, keys, values);
  common::Matrix q = common::Matrix::Zero(1, 8);
  q(0, 0) = 2.0F;
  q(0, 4) = 2.0F;
  const tests::ThreadCount threads(1);  // one thread computes both heads
  const common::Matrix output = stage3::attention(cache, 0, q, kBlockTable, count);
  REQUIRE(output.cols() == 8);
  const std::string head_0 = compare("the result", output(0, 0), 16.6875 / 2.75);
  CHECK(head_0 == kAsExpected);
  const std::string head_1 = compare("the result", output(0, 4), 166.875 / 2.75);
  CHECK(head_1 == kAsExpected);
}
