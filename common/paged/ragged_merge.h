// The last launch of ragged attention where contexts may be cut into parts.
#pragma once

#include "common/paged/ragged_plan.h"

namespace common {

// Joins the parts of each context that the plan has cut, and writes the rows of output that they make.
void merge_parts_of_contexts(const RaggedWorkspace& workspace, const PageShape& shape, int num_heads, void* output,
                             cudaStream_t stream);

}  // namespace common
