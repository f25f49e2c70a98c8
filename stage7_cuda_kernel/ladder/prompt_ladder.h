// The second ladder: causal attention of prompts, from plain arithmetic to Hopper's matrix instruction. As in the first
// one (ladder.h), a step has a file of its own, where all of it stands, serves bfloat16, head_dim 128 and blocks of 16
// tokens, and the last row is the kernel of common/paged/.
#pragma once

#include "ladder.h"

namespace stage7 {

struct PromptStep {
  const char* name;
  // Causal attention for num_tokens rows of queries, whose K and V are in the pages. A row sees its own sequence up to
  // itself; sequence s has the rows query_starts[s] to query_starts[s + 1] - 1, its last tokens. queries, output:
  // [num_tokens, num_heads, head_dim].
  void (*attend)(const Pages& pages, const BatchArrays& batch, const int* query_starts, const void* queries,
                 void* output, int num_tokens, void* workspace, cudaStream_t stream);
  RowOrder rows = RowOrder::kPlain;  // of the pages that it reads
  bool uses_wgmma = false;           // runs on compute capability 9.0 only
  // Null if there is no workspace. The plan is made once for all layers, and finished before `attend` begins.
  std::size_t (*workspace_bytes)(const PageShape& shape, const BatchArrays& batch, int num_tokens) = nullptr;
  void (*plan)(const PageShape& shape, const BatchArrays& batch, const int* query_starts, int num_tokens,
               void* workspace, cudaStream_t stream) = nullptr;
};

std::span<const PromptStep> prompt_ladder();

extern const PromptStep kPromptPlain;
extern const PromptStep kPromptMma;
extern const PromptStep kPromptWgmma;
extern const PromptStep kPromptProduction;  // with COURSE_PRODUCTION

}  // namespace
