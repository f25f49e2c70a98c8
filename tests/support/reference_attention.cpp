#include "tests/support/reference_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "common/base/check.h"
#include "common/base/parallel.h"

namespace tests {
namespace {

using common::Matrix;

// The numerically safe softmax: every exponent is at most 0, so no score overflows, however large.
void softmax_in_place(std::vector<double>& scores) {
  const double maximum = *std::max_element(scores.begin(), scores.end());
  double sum = 0.0;
  for (double& score : scores) {
    score = std::exp(score - maximum);
    sum += score;
  }
  for (double& score : scores) {
    score /= sum;
  }
}

}  // namespace

std::vector<double> reference_attention(const Matrix& q, const Matrix& k, const Matrix& v, int num_heads,
                                        int num_kv_heads, int head_dim, int window) {
  COMMON_CHECK(num_heads > 0 && num_kv_heads > 0 && head_dim > 0, "heads and their dimension must be positive");
  COMMON_CHECK(num_heads % num_kv_heads == 0, "every kv head must serve the same number of query heads");
  COMMON_CHECK(q.cols() == Eigen::Index{num_heads} * head_dim, "q: [num_queries, num_heads * head_dim]");
  COMMON_CHECK(k.cols() == Eigen::Index{num_kv_heads} * head_dim, "k: [length, num_kv_heads * head_dim]");
  COMMON_CHECK(v.rows() == k.rows() && v.cols() == k.cols(), "v must have the shape of k");
  COMMON_CHECK(q.rows() <= k.rows(), "the queries are the last tokens of the sequence");

  const Eigen::Index num_queries = q.rows();
  const Eigen::Index length = k.rows();
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  std::vector<double> output(static_cast<std::size_t>(num_queries * num_heads * head_dim), 0.0);

  const auto attend = [&](Eigen::Index query, int head) {
    // A token sees itself and everything before it, as far as the window reaches.
    const Eigen::Index end = length - num_queries + query + 1;
    const Eigen::Index begin = window > 0 ? std::max<Eigen::Index>(0, end - window) : 0;
    const int kv_head = head / (num_heads / num_kv_heads);
    const Eigen::Index q_column = Eigen::Index{head} * head_dim;
    const Eigen::Index kv_column = Eigen::Index{kv_head} * head_dim;

    std::vector<double> weights(static_cast<std::size_t>(end - begin), 0.0);
    for (Eigen::Index position = begin; position < end; ++position) {
      double dot = 0.0;
      for (int d = 0; d < head_dim; ++d) {
        dot += static_cast<double>(q(query, q_column + d)) * static_cast<double>(k(position, kv_column + d));
      }
      weights[static_cast<std::size_t>(position - begin)] = dot * scale;
    }
    softmax_in_place(weights);

    double* const sums = &output[static_cast<std::size_t>(query * num_heads * head_dim + q_column)];
    for (Eigen::Index position = begin; position < end; ++position) {
      for (int d = 0; d < head_dim; ++d) {
        sums[d] +=
            weights[static_cast<std::size_t>(position - begin)] * static_cast<double>(v(position, kv_column + d));
      }
    }
  };
  // In threads: the longest GPU tests would take minutes otherwise, in sabotage.py's build most of all.
  common::parallel_for(static_cast<int>(num_queries) * num_heads, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      attend(i / num_heads, i % num_heads);
    }
  });
  return output;
}

}  // namespace tests
