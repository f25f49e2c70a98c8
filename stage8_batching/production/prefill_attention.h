// The two kinds of kernel between which ragged_attention chooses: wgmma where the chip has it, mma elsewhere.
#pragma once

#include "ragged_plan.h"

namespace stage8 {

// Whether prefill_attention is compiled for this device and serves these pages.
bool prefill_serves(const PageShape& shape);

// ragged_attention for long prompts.
void prefill_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, cudaStream_t stream);

// The same for every chip, every head_dim, 16-bit and float8 pages, and for short prompts too.
void mma_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                   const RaggedWorkspace& workspace, bool is_short, cudaStream_t stream);

}  // namespace
