// Attention of long prompts with wgmma, which ragged_attention uses where the chip has it.
#pragma once

#include "common/paged/ragged_plan.h"

namespace common {

// attend_tasks() for pages that has_warpgroups() names.
void prefill_attention(const Pages& pages, const BatchArrays& batch, const void* queries, const int* order,
                       void* output, const RaggedWorkspace& workspace, bool beside_previous, cudaStream_t stream);

}  // namespace common
