#include "shared_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "../../attention.h"
#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/product.h"

namespace stage8 {
namespace {

// What one kv head's queries of one sequence know about the blocks so far: attention() in ../../attention.cpp, cut
// where it goes from one block to the next.
class SequenceAttention {
 public:
  SequenceAttention(const KvCache& cache, int layer, int kv_head, const common::Matrix& q, const RaggedBatch& batch,
                    std::size_t sequence)
      : cache_(cache),
        layer_(layer),
        kv_head_(kv_head),
        block_table_(batch.block_table(sequence)),
        context_length_(batch.context_lengths[sequence]),
        num_queries_(batch.num_queries(sequence)),
        first_query_(batch.query_starts[sequence]),
        q_(q.block(first_query_, first_col(), num_queries_, num_cols()) /
           std::sqrt(static_cast<float>(cache.shape().head_dim))),
        scratch_(num_rows(), cache.shape().block_size),
        softmax_(num_rows(), cache.shape().head_dim) {}

  int num_blocks() const { return static_cast<int>(block_table_.size()); }

  void add_block(int index) {
    const int block_size = cache_.shape().block_size;
    const int group = cache_.shape().num_queries_per_kv();
    const int first = index * block_size;
    const int slot = block_table_[static_cast<std::size_t>(index)] * block_size;
    const int count = std::min(block_size, context_length_ - first);
    const int first_query = std::max(0, first - (context_length_ - num_queries_));
    const int first_row = first_query * group;
    const common::MatrixView rows_q(q_.data(), num_rows(), cache_.shape().head_dim);
    auto scores = scratch_.topLeftCorner(num_rows() - first_row, count);
    common::multiply_transposed(rows_q.bottomRows(num_rows() - first_row), cache_.keys(layer_, kv_head_, slot, count),
                                scores);
    for (int i = 0; i < num_rows() - first_row; ++i) {
      const int num_visible = context_length_ - num_queries_ + first_query + i / group + 1 - first;
      scores.row(i).tail(std::max(0, count - num_visible)).setConstant(-std::numeric_limits<float>::infinity());
    }
    softmax_.add(first_row, scores, cache_.values(layer_, kv_head_, slot, count));
  }

  // Writes the sequence's part of the output of all sequences and heads.
  void finish(common::Matrix& output) {
    softmax_.output.array().colwise() /= softmax_.row_sum.array();
    output.block(first_query_, first_col(), num_queries_, num_cols()) =
        common::MatrixView(softmax_.output.data(), num_queries_, num_cols());
  }

 private:
  int num_cols() const { return cache_.shape().num_queries_per_kv() * cache_.shape().head_dim; }
  int first_col() const { return kv_head_ * num_cols(); }
  int num_rows() const { return num_queries_ * cache_.shape().num_queries_per_kv(); }

  const KvCache& cache_;
  int layer_;
  int kv_head_;
  std::span<const int> block_table_;
  int context_length_;
  int num_queries_;
  int first_query_;         // the sequence's first row of the step
  common::Matrix q_;        // [num_queries, query heads of the kv head * head_dim], scaled
  common::Matrix scratch_;  // the scores of a block
  OnlineSoftmax softmax_;
};

// Attention of the group's sequences. q, output: all rows of the step.
void attend_together(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                     const common::SharedPrefix& group, common::Matrix& output) {
  common::parallel_for(cache.shape().num_kv_heads, [&](int begin, int end) {
    for (int kv_head = begin; kv_head < end; ++kv_head) {
      std::vector<SequenceAttention> members;
      members.reserve(group.sequences.size());
      for (const int sequence : group.sequences) {
        members.emplace_back(cache, layer, kv_head, q, batch, static_cast<std::size_t>(sequence));
      }
      for (int index = 0; index < group.num_blocks; ++index) {
        // The block stays in the processor's first cache from one sequence to the next. One product for all of them
        // would be faster still, by up to a fifth, and would round differently.
        for (SequenceAttention& member : members) {
          member.add_block(index);
        }
      }
      for (SequenceAttention& member : members) {
        for (int index = group.num_blocks; index < member.num_blocks(); ++index) {
          member.add_block(index);
        }
        member.finish(output);
      }
    }
  });
}

}  // namespace

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
