#include "windowed_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include "../../attention.h"
#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/product.h"

namespace stage8 {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// The lesson's attention of one sequence, with a second end: blocks in front of the window are skipped, and scores of
// the slots in front of it are hidden as those behind the query are.
common::Matrix attention_of(const KvCache& cache, int layer, const common::Matrix& q, std::span<const int> block_table,
                            int context_length, int window) {
  const int head_dim = cache.shape().head_dim;
  const int group = cache.shape().num_queries_per_kv();
  const int block_size = cache.shape().block_size;
  const auto num_queries = static_cast<int>(q.rows());
  const int first_position = context_length - num_queries;  // of the queries
  const int first_seen = std::max(0, first_position + 1 - window);
  const common::Matrix scaled_q = q / std::sqrt(static_cast<float>(head_dim));

  common::Matrix output(q.rows(), q.cols());
  common::parallel_for(cache.shape().num_kv_heads, [&](int begin, int end) {
    common::Matrix scratch(num_queries * group, block_size);
    for (int kv_head = begin; kv_head < end; ++kv_head) {
      const common::Matrix group_q = scaled_q.middleCols(kv_head * group * head_dim, group * head_dim);
      const common::MatrixView rows_q(group_q.data(), num_queries * group, head_dim);
      OnlineSoftmax softmax(num_queries * group, head_dim);
      for (int first = first_seen / block_size * block_size; first < context_length; first += block_size) {
        const int slot = block_table[static_cast<std::size_t>(first / block_size)] * block_size;
        const int count = std::min(block_size, context_length - first);
        // Queries before this one lie before the block; those from the end on see none of it any more.
        const int first_query = std::max(0, first - first_position);
        const int end_query = std::min(num_queries, first + count - 1 + window - first_position);
        const int first_row = first_query * group;
        const int num_rows = (end_query - first_query) * group;
        auto scores = scratch.topLeftCorner(num_rows, count);
        common::multiply_transposed(rows_q.middleRows(first_row, num_rows), cache.keys(layer, kv_head, slot, count),
                                    scores);
        for (int i = 0; i < num_rows; ++i) {
          const int num_visible = first_position + first_query + i / group + 1 - first;
          scores.row(i).tail(std::max(0, count - num_visible)).setConstant(kHidden);
          scores.row(i).head(std::max(0, num_visible - window)).setConstant(kHidden);
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

common::Matrix windowed_attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                                  int window) {
  COMMON_CHECK(window > 0, "a query sees its own token");
  COMMON_CHECK(q.rows() == batch.num_tokens(), "the batch has one query for each token");
  common::Matrix output(q.rows(), q.cols());
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    const common::Matrix queries = q.middleRows(batch.query_starts[i], batch.num_queries(i));
    output.middleRows(batch.query_starts[i], batch.num_queries(i)) =
        attention_of(cache, layer, queries, batch.block_table(i), batch.context_lengths[i], window);
  }
  return output;
}

}  // namespace
