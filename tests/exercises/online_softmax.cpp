// Online softmax by itself, first one step of it and then the loop over blocks, in the numbers of the lesson: scores in
// units of ln 2, so that weights are powers of two, and the value of a token is its position.
#include "tests/support/catch.h"

#include <cmath>
#include <limits>
#include <vector>

#include "common/base/tensor.h"
#include "stage3/attention.h"
#include "stage3/kv_cache.h"

namespace {

using stage3::OnlineSoftmax;

// Sums of ten terms in float32: rounding is a hundred times smaller, any wrong weight a thousand times larger.
bool is_close(double value, double expected) { return std::abs(value - expected) <= 1e-4; }

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

void check_state(const OnlineSoftmax& softmax, int index, double maximum, double sum, double output) {
  CAPTURE(softmax.row_max(index), softmax.row_sum(index), softmax.output(index, 0), maximum * kLn2, sum, output);
  CHECK(is_close(softmax.row_max(index), maximum * static_cast<double>(kLn2)));
  CHECK(is_close(softmax.row_sum(index), sum));
  CHECK(is_close(softmax.output(index, 0), output));
}

const std::vector<float> kScores = {1, 0, 2, 1, 3, 1, 0, 2, 2, 4};
const std::vector<int> kBlockTable = {7, 1, 3};

// Attention of the last num_queries of ten tokens in these blocks of 4; a key is a score, and every query is 1. All
// other slots hold NaN.
common::Matrix attend(int num_queries) {
  stage3::KvCacheShape shape;
  shape.num_layers = 1;
  shape.num_blocks = 8;
  shape.block_size = 4;
  shape.num_heads = 1;
  shape.num_kv_heads = 1;
  shape.head_dim = 1;
  stage3::KvCache cache(shape);
  cache.fill(std::numeric_limits<float>::quiet_NaN());
  const int count = static_cast<int>(kScores.size());
  std::vector<int> slots;
  common::Matrix keys(count, 1);
  common::Matrix values(count, 1);
  for (int i = 0; i < count; ++i) {
    slots.push_back(kBlockTable[static_cast<std::size_t>(i / 4)] * 4 + i % 4);
    keys(i, 0) = kScores[static_cast<std::size_t>(i)] * kLn2;
    values(i, 0) = static_cast<float>(i);
  }
  cache.write(0, slots, keys, values);
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
  check_state(softmax, 0, 2, 2.25, 3.75);
  add_block(softmax, 0, row({3, 1, 0, 2}), 4);
  check_state(softmax, 0, 3, 3, 11.375);
  add_block(softmax, 0, row({2, 4}), 8);
  check_state(softmax, 0, 4, 2.75, 16.6875);
}

TEST_CASE("online softmax: a block without a larger score rescales nothing") {
  OnlineSoftmax softmax(1, 1);
  add_block(softmax, 0, row({5}), 7);
  check_state(softmax, 0, 5, 1, 7);
  add_block(softmax, 0, row({4, 5}), 8);
  check_state(softmax, 0, 5, 2.5, 7 + 4 + 9);
}

TEST_CASE("online softmax: rows before first_row are left alone, and each row has its own maximum") {
  OnlineSoftmax softmax(3, 1);
  common::Matrix scores(3, 1);
  scores << 0, 1, 2;
  add_block(softmax, 0, scores, 1);
  scores.resize(2, 1);
  scores << 3, 1;
  add_block(softmax, 1, scores, 10);
  check_state(softmax, 0, 0, 1, 1);
  check_state(softmax, 1, 3, 1.25, 10.25);
  check_state(softmax, 2, 2, 1.5, 1 + 5);
}

TEST_CASE("online softmax: a score of minus infinity has no weight") {
  OnlineSoftmax softmax(1, 1);
  add_block(softmax, 0, row({2, -kInfinity}), 3);
  check_state(softmax, 0, 2, 1, 3);
}

TEST_CASE("reading blocks: the last of ten tokens in the blocks [7, 1, 3], by hand") {
  CHECK(is_close(attend(1)(0, 0), 16.6875 / 2.75));
}

TEST_CASE("reading blocks: each query of a chunk sees what comes before it and itself, and no slot behind the end") {
  for (int num_queries = 1; num_queries <= 10; ++num_queries) {
    const common::Matrix output = attend(num_queries);
    REQUIRE(output.rows() == num_queries);
    for (int query = 0; query < num_queries; ++query) {
      CAPTURE(num_queries, query, output(query, 0), softmax_up_to(10 - num_queries + query));
      CHECK(is_close(output(query, 0), softmax_up_to(10 - num_queries + query)));
    }
  }
}
