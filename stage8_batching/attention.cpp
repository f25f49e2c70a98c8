#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/product.h"

namespace stage8 {

OnlineSoftmax::OnlineSoftmax(int num_rows, int head_dim)
    : row_max(Eigen::VectorXf::Constant(num_rows, std::numeric_limits<float>::lowest())),
      row_sum(Eigen::VectorXf::Zero(num_rows)),
      output(common::Matrix::Zero(num_rows, head_dim)) {}

void OnlineSoftmax::add(int first_row, Eigen::Ref<common::Matrix> scores, const common::MatrixView& values) {
  for (Eigen::Index i = 0; i < scores.rows(); ++i) {
    const Eigen::Index row = first_row + i;
    const float previous = row_max(row);
    const float maximum = std::max(previous, scores.row(i).maxCoeff());
    const float rescale = std::exp(previous - maximum);  // the earlier results were computed with `previous`
    row_max(row) = maximum;
    row_sum(row) = row_sum(row) * rescale + common::exponentials(scores.row(i), maximum);
    output.row(row) *= rescale;
  }
  common::multiply_add(scores, values, output.middleRows(first_row, scores.rows()));
}

common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, std::span<const int> block_table,
                         int context_length) {
  const int head_dim = cache.shape().head_dim;
  const int num_heads = cache.shape().num_heads;
  const int num_kv_heads = cache.shape().num_kv_heads;
  const int group = cache.shape().num_queries_per_kv();
  const int block_size = cache.shape().block_size;
  const auto num_queries = static_cast<int>(q.rows());
  COMMON_CHECK(q.cols() == Eigen::Index{num_heads} * head_dim, "q has the wrong shape");
  COMMON_CHECK(num_queries <= context_length, "more queries than tokens");
  COMMON_CHECK(context_length <= static_cast<int>(block_table.size()) * block_size, "the block table is too short");
  const common::Matrix scaled_q = q / std::sqrt(static_cast<float>(head_dim));

  common::Matrix output(q.rows(), q.cols());
  common::parallel_for(num_kv_heads, [&](int begin, int end) {
    common::Matrix scratch(num_queries * group, block_size);
    for (int kv_head = begin; kv_head < end; ++kv_head) {
      // The query heads that read this kv head: [num_queries, group * head_dim]. The same floats, in the same order,
      // are a row for each query head of each query: [num_queries * group, head_dim].
      const common::Matrix group_q = scaled_q.middleCols(kv_head * group * head_dim, group * head_dim);
      const common::MatrixView rows_q(group_q.data(), num_queries * group, head_dim);
      OnlineSoftmax softmax(num_queries * group, head_dim);
      for (int first = 0; first < context_length; first += block_size) {
        const int slot = block_table[static_cast<std::size_t>(first / block_size)] * block_size;
        const int count = std::min(block_size, context_length - first);  // the last block may be partly filled
        // Queries before this one lie before the whole block and see none of it.
        const int first_query = std::max(0, first - (context_length - num_queries));
        const int first_row = first_query * group;
        const int num_rows = (num_queries - first_query) * group;
        auto scores = scratch.topLeftCorner(num_rows, count);
        common::multiply_transposed(rows_q.middleRows(first_row, num_rows), cache.keys(layer, kv_head, slot, count),
                                    scores);
        for (int i = 0; i < num_rows; ++i) {
          const int num_visible = context_length - num_queries + first_query + i / group + 1 - first;
          scores.row(i).tail(std::max(0, count - num_visible)).setConstant(-std::numeric_limits<float>::infinity());
        }
        softmax.add(first_row, scores, cache.values(layer, kv_head, slot, count));
      }
      softmax.output.array().colwise() /= softmax.row_sum.array();
      output.middleCols(kv_head * group * head_dim, group * head_dim) =
          common::MatrixView(softmax.output.data(), num_queries, group * head_dim);
    }
  });
  return output;
}

}  // namespace
