// Causal attention of one sequence's newest tokens over everything the sequence has in the cache.
#pragma once

#include "common/base/tensor.h"
#include "kv_cache.h"

namespace stage2 {

// q: [num_queries, num_heads * head_dim], the last num_queries of the sequence's context_length tokens, whose K and V
// are in the cache already: a token sees itself. Query i sees positions 0 … context_length - num_queries + i, and
// position p is in block block_table[p / block_size], row p % block_size.
// Returns softmax(q k^T / sqrt(head_dim)) v, head by head: [num_queries, num_heads * head_dim].
common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, std::span<const int> block_table,
                         int context_length);

// One head's K and V copied out of the blocks: [context_length, head_dim] each.
struct HeadKv {
  common::Matrix k;
  common::Matrix v;
};
HeadKv gather(const KvCache& cache, int layer, int head, std::span<const int> block_table, int context_length);

}  // namespace
