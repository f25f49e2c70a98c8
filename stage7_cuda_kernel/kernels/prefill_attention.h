// Causal attention of prompts where there is wgmma, for ragged_attention.
#pragma once

#include "ragged_plan.h"

namespace stage7 {

// Whether the device and these pages are what the kernel is made for.
bool prefill_serves(const PageShape& shape);

// As ragged_attention, with tasks of 128 rows.
void prefill_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, cudaStream_t stream);

}  // namespace
