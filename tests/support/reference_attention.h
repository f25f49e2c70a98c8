// Causal grouped-query attention in float64, written to be read rather than to be fast: all implementations are
// compared with it.
#pragma once

#include <vector>

#include "common/base/tensor.h"

namespace tests {

// q: [num_queries, num_heads * head_dim], the last num_queries tokens of the sequence.
// k, v: [length, num_kv_heads * head_dim], the whole sequence in order, the queries' own tokens included.
// Query i sees positions 0 … length - num_queries + i, or the last `window` of them if that is not 0. Query head h
// reads KV head h / (num_heads / num_kv_heads). Scores are scaled by 1 / sqrt(head_dim). Returns [num_queries,
// num_heads * head_dim], row-major. Throws CheckError if the shapes do not fit together.
std::vector<double> reference_attention(const common::Matrix& q, const common::Matrix& k, const common::Matrix& v,
                                        int num_heads, int num_kv_heads, int head_dim, int window = 0);

}  // namespace tests
