// The two kinds of kernel behind ragged_attention, which chooses one: by wgmma where it exists, by mma elsewhere.
#pragma once

#include "ragged_plan.h"

namespace stage8 {

// Whether the device and these pages are what the kernel is made for.
bool prefill_serves(const PageShape& shape);

// As ragged_attention, of long prompts.
void prefill_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, cudaStream_t stream);

// The same for every chip and head_dim, 16-bit or float8 pages, and short prompts too.
void mma_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                   const RaggedWorkspace& workspace, bool is_short, cudaStream_t stream);

}  // namespace
