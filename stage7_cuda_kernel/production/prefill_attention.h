// Attention of long prompts with wgmma, which ragged_attention uses where the chip has it.
#pragma once

#include "ragged_plan.h"

namespace stage7 {

// Whether prefill_attention is compiled for this device and serves these pages.
bool prefill_serves(const PageShape& shape);

// ragged_attention for long prompts.
void prefill_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, cudaStream_t stream);

}  // namespace
