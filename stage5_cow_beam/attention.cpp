#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/product.h"

namespace stage5 {
namespace {

// [num_queries, num_heads * size] to [num_heads * num_queries, size]: one head's queries become a dense matrix. With
// num_kv_heads for num_heads: all the queries that read one kv head.
common::Matrix split_heads(const common::Matrix& x, int num_heads) {
  const Eigen::Index size = x.cols() / num_heads;
  common::Matrix heads(num_heads * x.rows(), size);
  for (int head = 0; head < num_heads; ++head) {
    heads.middleRows(head * x.rows(), x.rows()) = x.middleCols(head * size, size);
  }
  return heads;
}

// The other way round.
common::Matrix merge_heads(const common::Matrix& heads, int num_heads) {
  const Eigen::Index rows = heads.rows() / num_heads;
  common::Matrix x(rows, num_heads * heads.cols());
  for (int head = 0; head < num_heads; ++head) {
    x.middleCols(head * heads.cols(), heads.cols()) = heads.middleRows(head * rows, rows);
  }
  return x;
}

}  // namespace

common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, std::span<const int> block_table,
                         int context_length, SoftmaxMode mode) {
  const int head_dim = cache.shape().head_dim;
  const int num_heads = cache.shape().num_heads;
  const int num_kv_heads = cache.shape().num_kv_heads;
  const int group = cache.shape().num_queries_per_kv();
  const int block_size = cache.shape().block_size;
  const auto num_queries = static_cast<int>(q.rows());
  COMMON_CHECK(q.cols() == Eigen::Index{num_heads} * head_dim, "q has another shape");
  COMMON_CHECK(num_queries <= context_length, "more queries than tokens");
  COMMON_CHECK(context_length <= static_cast<int>(block_table.size()) * block_size, "the block table is too short");
  common::Matrix scaled_q = split_heads(q / std::sqrt(static_cast<float>(head_dim)), num_kv_heads);
  scaled_q.resize(num_heads * num_queries, head_dim);  // a row a query head; the floats stay where they are

  // All that softmax has to remember of the blocks so far, by row of scaled_q.
  common::Matrix output = common::Matrix::Zero(scaled_q.rows(), head_dim);  // weights * v
  Eigen::VectorXf sums = Eigen::VectorXf::Zero(scaled_q.rows());            // of the weights exp(score - largest)
  Eigen::VectorXf largest = Eigen::VectorXf::Constant(scaled_q.rows(), std::numeric_limits<float>::lowest());  // score
  // The safe form walks twice, and knows the largest scores before it forms the first weight.
  for (int walk = mode == SoftmaxMode::kSafe ? 0 : 1; walk < 2; ++walk) {
    common::parallel_for(num_kv_heads, [&](int begin, int end) {
      common::Matrix scratch(num_queries * group, block_size);
      for (int first = 0; first < context_length; first += block_size) {
        const int slot = block_table[static_cast<std::size_t>(first / block_size)] * block_size;
        const int count = std::min(block_size, context_length - first);  // the last block may be partly filled
        // Queries before this one come too early in the sequence to see the block at all.
        const int first_query = std::max(0, first - (context_length - num_queries));
        const int num_rows = (num_queries - first_query) * group;
        for (int kv_head = begin; kv_head < end; ++kv_head) {
          const int first_row = (kv_head * num_queries + first_query) * group;
          auto weights = scratch.topLeftCorner(num_rows, count);
          common::multiply_transposed(scaled_q.middleRows(first_row, num_rows), cache.keys(layer, kv_head, slot, count),
                                      weights);
          for (int i = 0; i < num_rows; ++i) {
            const int query = first_query + i / group;
            const int num_visible = std::min(count, context_length - num_queries + query + 1 - first);
            auto visible = weights.row(i).head(num_visible);
            const float previous = largest(first_row + i);
            const float maximum = std::max(previous, visible.maxCoeff());
            largest(first_row + i) = maximum;
            if (walk == 1) {
              const float rescale = std::exp(previous - maximum);  // the earlier weights were formed with `previous`
              sums(first_row + i) = sums(first_row + i) * rescale + common::exponentials(visible, maximum);
              weights.row(i).tail(count - num_visible).setZero();
              output.row(first_row + i) *= rescale;
            }
          }
          if (walk == 1) {
            common::multiply_add(weights, cache.values(layer, kv_head, slot, count),
                                 output.middleRows(first_row, num_rows));
          }
        }
      }
    });
  }
  output.array().colwise() /= sums.array();
  output.resize(num_kv_heads * num_queries, group * head_dim);
  return merge_heads(output, num_kv_heads);
}

}  // namespace
