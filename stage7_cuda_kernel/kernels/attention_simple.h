// Attention without tensor cores: float32, for exact comparisons with the CPU.
#pragma once

#include "kernels.h"

namespace stage7 {

// Arguments as ragged_attention's, already checked; without query_starts as decode_attention's, with one row for each
// sequence.
void attention_simple(const Pages& pages, const Batch& batch, const int* query_starts, const void* queries,
                      void* output, int num_tokens, cudaStream_t stream);

}  // namespace
