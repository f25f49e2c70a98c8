// Decode attention over a cache without blocks: the same kernel, but for the table. Nothing else uses it.
#pragma once

#include "stage7/production/production_kernels.h"

namespace stage7 {

// cache: [num_sequences, num_kv_heads, capacity, head_dim], with num_sequences and capacity in the places of num_blocks
// and block_size; sequence s of the batch has row s, whatever the batch's block tables say. Bfloat16, head_dim 128,
// capacity a multiple of 16. workspace: as plan_decode fills it for pages with as many heads; what else is checked and
// given is decode_attention's.
void contiguous_attention(const Pages& cache, const Batch& batch, const void* queries, void* output, void* workspace,
                          cudaStream_t stream, const DecodeOptions& options = {});

}  // namespace
