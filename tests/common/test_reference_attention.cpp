// The reference attention, compared with results by hand, and its properties.
#include <cmath>
#include <cstddef>
#include <vector>

#include "common/base/check.h"
#include "common/base/tensor.h"
#include "tests/support/catch.h"
#include "tests/support/reference_attention.h"

namespace {

using common::CheckError;
using common::Matrix;

}  // namespace

TEST_CASE("reference attention: two tokens by hand") {
  // One head of one dimension, so the scale is 1. The second query's scores are 2 * 0 = 0 and 2 * ln(3) / 2 = ln 3:
  // weights 1/4 and 3/4. The first query sees only its own token.
  Matrix q(2, 1);
  q << 5.0F, 2.0F;
  Matrix k(2, 1);
  k << 0.0F, static_cast<float>(std::log(3.0) / 2.0);
  Matrix v(2, 1);
  v << 8.0F, 16.0F;
  const std::vector<double> actual = tests::reference_attention(q, k, v, 1, 1, 1);
  REQUIRE(actual.size() == 2);
  CHECK(actual[0] == 8.0);
  // The logarithm was rounded to float: 6e-8 relative, times a slope of 3/16 and values 8 apart.
  CHECK(std::abs(actual[1] - 14.0) < 1e-6);

  // The last query alone, as in decoding, sees the same tokens.
  CHECK(tests::reference_attention(q.bottomRows(1), k, v, 1, 1, 1) == std::vector<double>{actual[1]});
}

TEST_CASE("reference attention: scores are scaled by 1 / sqrt(head_dim)") {
  // Four dimensions give q.k = 4 ln 3, with scale 1/2: a score of 2 ln 3, weights 1/10 and 9/10.
  const Matrix q = Matrix::Constant(1, 4, 1.0F);
  Matrix k = Matrix::Zero(2, 4);
  k.row(1).setConstant(static_cast<float>(std::log(3.0)));
  Matrix v(2, 4);
  v << 10.0F, 20.0F, 30.0F, 40.0F, 0.0F, 0.0F, 0.0F, 0.0F;
  const std::vector<double> actual = tests::reference_attention(q, k, v, 1, 1, 4);
  REQUIRE(actual.size() == 4);
  for (std::size_t d = 0; d < 4; ++d) {
    CHECK(std::abs(actual[d] - static_cast<double>(d + 1)) < 1e-5);
  }
}

TEST_CASE("reference attention: one-hot keys and huge scores pick one value") {
  // Key p is 1e4 times the p-th unit vector. A query of the same form picks its position alone: the other weights are
  // exp(-5e7) = 0, exactly.
  constexpr int kLength = 4;
  const Matrix keys = Matrix::Identity(kLength, kLength) * 1e4F;
  Matrix v(kLength, kLength);
  v << 11.0F, 12.0F, 13.0F, 14.0F,  //
      21.0F, 22.0F, 23.0F, 24.0F,   //
      31.0F, 32.0F, 33.0F, 34.0F,   //
      41.0F, 42.0F, 43.0F, 44.0F;
  Matrix q(2, kLength);
  q.row(0) = keys.row(1);  // at position 2, matches the key of position 1
  q.row(1) = keys.row(3);  // at position 3, matches its own key
  CHECK(tests::reference_attention(q, keys, v, 1, 1, kLength) ==
        std::vector<double>{21.0, 22.0, 23.0, 24.0, 41.0, 42.0, 43.0, 44.0});

  // The first query matches the key of position 3, which it must not see; the three visible scores are equal.
  q.row(0) = keys.row(3);
  const std::vector<double> tied = tests::reference_attention(q, keys, v, 1, 1, kLength);
  for (std::size_t d = 0; d < kLength; ++d) {
    CHECK(std::abs(tied[d] - (21.0 + static_cast<double>(d))) < 1e-12);
  }
}

TEST_CASE("reference attention: query heads share kv heads in consecutive groups") {
  // Kv head g holds the value g + 1 in every position: the output names the head that was read.
  constexpr int kHeadDim = 2;
  constexpr int kLength = 3;
  const Matrix q = Matrix::Ones(1, Eigen::Index{12} * kHeadDim);
  for (const int num_kv_heads : {1, 2, 3, 4, 6, 12}) {
    Matrix v(kLength, Eigen::Index{num_kv_heads} * kHeadDim);
    for (Eigen::Index column = 0; column < v.cols(); ++column) {
      const Eigen::Index kv_head = column / kHeadDim;
      v.col(column).setConstant(static_cast<float>(kv_head + 1));
    }
    const Matrix k = Matrix::Ones(v.rows(), v.cols());
    const std::vector<double> actual = tests::reference_attention(q, k, v, 12, num_kv_heads, kHeadDim);
    REQUIRE(actual.size() == 24);
    for (int head = 0; head < 12; ++head) {
      CAPTURE(num_kv_heads, head);
      const int kv_head = head * num_kv_heads / 12;
      CHECK(std::abs(actual[static_cast<std::size_t>(head) * kHeadDim] - (kv_head + 1)) < 1e-12);
      CHECK(std::abs(actual[static_cast<std::size_t>(head) * kHeadDim + 1] - (kv_head + 1)) < 1e-12);
    }
  }
}

TEST_CASE("reference attention: each head scores with its own keys") {
  // Two positions, two kv heads of two dimensions: head 0's key at position 0 is huge, head 1's at position 1.
  const Matrix q = Matrix::Constant(1, 4, 1e4F);
  Matrix k = Matrix::Zero(2, 4);
  k(0, 1) = 1.0F;
  k(1, 2) = 1.0F;
  Matrix v(2, 4);
  v << 1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 7.0F, 8.0F;
  CHECK(tests::reference_attention(q, k, v, 2, 2, 2) == std::vector<double>{1.0, 2.0, 7.0, 8.0});
}

TEST_CASE("reference attention: refuses shapes that do not fit") {
  const auto attend = [](int queries, int q_columns, int length, int kv_columns, int v_length, int num_heads,
                         int num_kv_heads) {
    return tests::reference_attention(Matrix::Zero(queries, q_columns), Matrix::Zero(length, kv_columns),
                                      Matrix::Zero(v_length, kv_columns), num_heads, num_kv_heads, 2);
  };
  CHECK(attend(1, 8, 3, 4, 3, 4, 2) == std::vector<double>(8, 0.0));
  CHECK(attend(0, 8, 3, 4, 3, 4, 2).empty());
  CHECK_THROWS_AS(attend(1, 6, 3, 4, 3, 4, 2), CheckError);  // q too narrow
  CHECK_THROWS_AS(attend(1, 8, 3, 6, 3, 4, 2), CheckError);  // k too wide
  CHECK_THROWS_AS(attend(1, 8, 3, 4, 2, 4, 2), CheckError);  // v too short
  CHECK_THROWS_AS(attend(4, 8, 3, 4, 3, 4, 2), CheckError);  // more queries than tokens
  CHECK_THROWS_AS(attend(1, 8, 3, 6, 3, 4, 3), CheckError);  // 3 does not divide 4
  CHECK_THROWS_AS(attend(1, 0, 3, 0, 3, 0, 0), CheckError);
}
