// Causal attention of one sequence's newest tokens over everything the sequence has in the cache.
#pragma once

#include "common/base/tensor.h"
#include "kv_cache.h"

namespace stage1 {

// q: [num_queries, num_heads * head_dim], the last num_queries of the sequence's context_length tokens, whose K and V
// are in the cache already: a token sees itself. Query i sees positions 0 … context_length - num_queries + i, and
// position p is in slot first_slot + p.
// Returns softmax(q k^T / sqrt(head_dim)) v, head by head: [num_queries, num_heads * head_dim].
common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, int first_slot, int context_length);

}  // namespace
