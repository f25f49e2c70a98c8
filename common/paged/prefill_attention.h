// Attention of long prompts with wgmma, which ragged_attention uses where the chip has it.
#pragma once

#include "common/paged/ragged_plan.h"

namespace common {

// ragged_attention for pages that has_warpgroups() names. beside_previous: see RaggedOptions.
void prefill_attention(const Pages& pages, const BatchArrays& batch, const void* queries, void* output,
                       const RaggedWorkspace& workspace, bool beside_previous, cudaStream_t stream);

}  // namespace common
