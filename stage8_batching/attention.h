// Causal attention of one sequence's newest tokens over everything the sequence has in the cache.
#pragma once

#include "common/base/tensor.h"
#include "kv_cache.h"

namespace stage8 {

// Softmax over scores that arrive block by block: what each row of scores keeps about the blocks so far. Whenever a
// larger score turns up, the earlier results are rescaled (Milakov and Gimelshein, arXiv 1805.02867).
struct OnlineSoftmax {
  Eigen::VectorXf row_max;  // the largest score
  Eigen::VectorXf row_sum;  // sum of exp(score - row_max)
  common::Matrix output;    // [num_rows, head_dim] sum of exp(score - row_max) * value

  OnlineSoftmax(int num_rows, int head_dim);

  // Adds a block to the rows from first_row on. scores: [rows, count], -inf where masked; they become the weights.
  // values: [count, head_dim].
  void add(int first_row, Eigen::Ref<common::Matrix> scores, const common::MatrixView& values);
};

// q: [num_queries, num_heads * head_dim], the last num_queries of the sequence's context_length tokens, whose K and V
// are in the cache already: a token sees itself. Query i sees positions 0 … context_length - num_queries + i, and
// position p is in block block_table[p / block_size], row p % block_size.
// Returns softmax(q k^T / sqrt(head_dim)) v, head by head: [num_queries, num_heads * head_dim].
common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, std::span<const int> block_table,
                         int context_length);

}  // namespace
