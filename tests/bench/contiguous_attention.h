// Decode attention over a cache without blocks: the same kernel except for the table. Nothing else uses it.
#pragma once

#include "common/paged/attention_launches.h"
#include "stage7/kernels/kernels.h"

namespace stage7 {

// cache: [num_sequences, num_kv_heads, capacity, head_dim]: num_sequences takes the place of num_blocks, capacity the
// place of block_size. Sequence s of the batch has row s, whatever the batch's block tables say. Bfloat16, head_dim
// 128, capacity a multiple of 16. workspace: as plan_decode fills it for pages with as many heads. The other parameters
// and the checks are decode_attention's.
void contiguous_attention(const Pages& cache, const BatchArrays& batch, const void* queries, void* output,
                          void* workspace, cudaStream_t stream, const common::DecodeOptions& options = {});

}  // namespace
