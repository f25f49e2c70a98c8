// Attention of long prompts with wgmma, which ragged_attention uses where the chip has it.
#pragma once

#include "ragged_plan.h"

namespace stage7 {

// ragged_attention for pages that has_warpgroups() names. beside_previous: see RaggedOptions.
void prefill_attention(const Pages& pages, const Batch& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, bool beside_previous, cudaStream_t stream);

}  // namespace
