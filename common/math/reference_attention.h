// Causal grouped-query attention in float64, written for the eye and not for speed: what all kernels are held to.
#pragma once

#include <span>
#include <vector>

#include "common/base/tensor.h"

namespace common {

// q: [num_queries, num_heads * head_dim], the last num_queries tokens of the sequence.
// k, v: [length, num_kv_heads * head_dim], the whole sequence in order, query tokens included.
// Query i sees positions 0 … length - num_queries + i. Query head h reads kv head h / (num_heads / num_kv_heads).
// Scores are scaled by 1 / sqrt(head_dim). Returns [num_queries, num_heads * head_dim], row-major.
std::vector<double> reference_attention(const Matrix& q, const Matrix& k, const Matrix& v, int num_heads,
                                        int num_kv_heads, int head_dim);

}  // namespace common
