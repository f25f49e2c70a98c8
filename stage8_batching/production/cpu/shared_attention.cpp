#include "shared_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "../../attention.h"
#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/lanes.h"
#include "common/math/product.h"

namespace stage8 {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Rows of a group, of one sequence or more: a row for each query head of each query that reads a kv head.
struct Rows {
  int first;
  int count;
};

// The rows of each sequence.
std::vector<Rows> rows_of(const RaggedBatch& batch, const common::SharedPrefix& group, int num_queries_per_kv) {
  std::vector<Rows> result;
  int first = 0;
  for (const int sequence : group.sequences) {
    result.push_back({first, batch.num_queries(static_cast<std::size_t>(sequence)) * num_queries_per_kv});
    first += result.back().count;
  }
  return result;
}

// The same rows, four sequences' or two's in a product where these have four rows, as many as common/math/product.h
// computes at a time: each as if it were alone, if there are only whole vectors.
std::vector<Rows> joined(const std::vector<Rows>& of_sequences, int head_dim) {
  constexpr int kTogether = 4;
  std::vector<Rows> result;
  for (auto rows = of_sequences.begin(); rows != of_sequences.end();) {
    const int num_sequences =
        head_dim % common::kNumLanes == 0 && kTogether % rows->count == 0 ? kTogether / rows->count : 1;
    const bool is_fitting =
        of_sequences.end() - rows >= num_sequences &&
        std::all_of(rows, rows + num_sequences, [&](const Rows& other) { return other.count == rows->count; });
    result.push_back({rows->first, rows->count * (is_fitting ? num_sequences : 1)});
    rows += is_fitting ? num_sequences : 1;
  }
  return result;
}

}  // namespace

void attend_together(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                     const common::SharedPrefix& group, common::Matrix& output, int window) {
  const int head_dim = cache.shape().head_dim;
  const int num_queries_per_kv = cache.shape().num_queries_per_kv();
  const int block_size = cache.shape().block_size;
  const std::vector<Rows> of_sequences = rows_of(batch, group, num_queries_per_kv);
  const std::vector<Rows> pieces = joined(of_sequences, head_dim);
  const int num_rows = of_sequences.back().first + of_sequences.back().count;
  const int num_queries = num_rows / num_queries_per_kv;
  const int cols = num_queries_per_kv * head_dim;
  // Calls visit(a sequence's first query in the group, its first one in the step, how many it has).
  const auto for_queries = [&](const auto& visit) {
    for (std::size_t i = 0; i < of_sequences.size(); ++i) {
      visit(of_sequences[i].first / num_queries_per_kv,
            batch.query_starts[static_cast<std::size_t>(group.sequences[i])],
            of_sequences[i].count / num_queries_per_kv);
    }
  };
  const float scale = std::sqrt(static_cast<float>(head_dim));

  common::parallel_for(cache.shape().num_kv_heads, [&](int begin, int end) {
    common::Matrix scratch(num_rows, block_size);
    common::Matrix group_q(num_queries, cols);
    for (int kv_head = begin; kv_head < end; ++kv_head) {
      for_queries([&](int to, int from, int count) {
        group_q.middleRows(to, count) = q.block(from, kv_head * cols, count, cols) / scale;
      });
      const common::MatrixView rows_q(group_q.data(), num_rows, head_dim);
      OnlineSoftmax softmax(num_rows, head_dim);
      const auto scores_of = [&](const Rows& rows, int slot, int count) {
        auto scores = scratch.topLeftCorner(rows.count, count);
        common::multiply_transposed(rows_q.middleRows(rows.first, rows.count), cache.keys(layer, kv_head, slot, count),
                                    scores);
        return scores;
      };

      const std::span<const int> shared = batch.block_table(static_cast<std::size_t>(group.sequences.front()));
      for (int index = 0; index < group.num_blocks; ++index) {
        const int slot = shared[static_cast<std::size_t>(index)] * block_size;
        for (const Rows& rows : pieces) {  // meanwhile the block stays in the processor's first cache
          softmax.add(rows.first, scores_of(rows, slot, block_size), cache.values(layer, kv_head, slot, block_size));
        }
      }

      // As in ../../attention.cpp, from the first block behind the shared ones on. With a window, there is a second
      // end: blocks in front of it are skipped, and scores of the slots in front of it are hidden as those behind the
      // query are.
      for (std::size_t i = 0; i < of_sequences.size(); ++i) {
        const auto sequence = static_cast<std::size_t>(group.sequences[i]);
        const int context_length = batch.context_lengths[sequence];
        const int num_old = context_length - batch.num_queries(sequence);
        const int num_seen = window > 0 ? window : context_length;  // by a query at the most
        const int begin_block = std::max(group.num_blocks, (num_old + 1 - num_seen) / block_size);
        for (int first = begin_block * block_size; first < context_length; first += block_size) {
          const int slot = batch.block_table(sequence)[static_cast<std::size_t>(first / block_size)] * block_size;
          const int count = std::min(block_size, context_length - first);
          // Queries before this one lie before the block; those from the end on see none of it any more.
          const int first_query = std::max(0, first - num_old);
          const int end_query = std::min(batch.num_queries(sequence), first + count - 1 + num_seen - num_old);
          const Rows rows{of_sequences[i].first + first_query * num_queries_per_kv,
                          (end_query - first_query) * num_queries_per_kv};
          auto scores = scores_of(rows, slot, count);
          for (int row = 0; row < rows.count; ++row) {
            const int num_visible = num_old + first_query + row / num_queries_per_kv + 1 - first;
            scores.row(row).tail(std::max(0, count - num_visible)).setConstant(kHidden);
            scores.row(row).head(std::max(0, num_visible - num_seen)).setConstant(kHidden);
          }
          softmax.add(rows.first, scores, cache.values(layer, kv_head, slot, count));
        }
      }

      softmax.output.array().colwise() /= softmax.row_sum.array();
      const common::MatrixView results(softmax.output.data(), num_queries, cols);
      for_queries([&](int from, int to, int count) {
        output.block(to, kv_head * cols, count, cols) = results.middleRows(from, count);
      });
    }
  });
}

common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                         std::span<const common::SharedPrefix> groups) {
  COMMON_CHECK(q.rows() == batch.num_tokens(), "the batch has one query for each token");
  common::Matrix output(q.rows(), q.cols());
  std::vector<bool> is_done(batch.num_sequences());
  for (const common::SharedPrefix& group : groups) {
    attend_together(cache, layer, q, batch, group, output);
    for (const int sequence : group.sequences) {
      is_done[static_cast<std::size_t>(sequence)] = true;
    }
  }
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    if (!is_done[i]) {
      const common::Matrix queries = q.middleRows(batch.query_starts[i], batch.num_queries(i));
      output.middleRows(batch.query_starts[i], batch.num_queries(i)) =
          attention(cache, layer, queries, batch.block_table(i), batch.context_lengths[i]);
    }
  }
  return output;
}

}  // namespace
