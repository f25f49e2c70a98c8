#include "attention.h"

#include <algorithm>
#include <cmath>

#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/product.h"

namespace stage2 {

common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, std::span<const int> block_table,
                         int context_length) {
  const int head_dim = cache.shape().head_dim;
  const int num_heads = cache.shape().num_heads;
  const auto num_queries = static_cast<int>(q.rows());
  COMMON_CHECK(q.cols() == Eigen::Index{num_heads} * head_dim, "q has the wrong shape");
  COMMON_CHECK(num_queries <= context_length, "more queries than tokens");
  const common::Matrix scaled_q = q / std::sqrt(static_cast<float>(head_dim));

  common::Matrix output(q.rows(), q.cols());
  common::parallel_for(num_heads, [&](int begin, int end) {
    Eigen::VectorXf sums(num_queries);  // of each query's weights
    for (int head = begin; head < end; ++head) {
      const auto [k, v] = gather(cache, layer, head, block_table, context_length);

      common::Matrix weights(num_queries, context_length);  // the scores at first
      common::multiply_transposed(scaled_q.middleCols(head * head_dim, head_dim), k, weights);
      for (int query = 0; query < num_queries; ++query) {
        const int num_visible = context_length - num_queries + query + 1;
        auto visible = weights.row(query).head(num_visible);
        // The largest score is subtracted, so that no exponential overflows.
        sums(query) = common::exponentials(visible, visible.maxCoeff());
        weights.row(query).tail(context_length - num_visible).setZero();
      }
      auto output_head = output.middleCols(head * head_dim, head_dim);
      output_head.setZero();
      common::multiply_add(weights, v, output_head);
      output_head.array().colwise() /= sums.array();
    }
  });
  return output;
}

HeadKv gather(const KvCache& cache, int layer, int head, std::span<const int> block_table, int context_length) {
  const int block_size = cache.shape().block_size;
  const int head_dim = cache.shape().head_dim;
  COMMON_CHECK(context_length <= static_cast<int>(block_table.size()) * block_size, "the block table is too short");
  HeadKv copy{common::Matrix(context_length, head_dim), common::Matrix(context_length, head_dim)};
  for (int first = 0; first < context_length; first += block_size) {
    const int slot = block_table[static_cast<std::size_t>(first / block_size)] * block_size;
    const int count = std::min(block_size, context_length - first);  // the last block may be partly filled
    copy.k.middleRows(first, count) = cache.keys(layer, head, slot, count);
    copy.v.middleRows(first, count) = cache.values(layer, head, slot, count);
  }
  return copy;
}

}  // namespace
