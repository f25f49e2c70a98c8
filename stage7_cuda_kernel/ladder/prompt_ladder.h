// The second ladder: causal attention of prompts, from Ampere's matrix instruction to the kernel that Hopper runs.
//
// A step has the arguments of ragged_attention, after plan_ragged (attention_launches.h), but supports bfloat16,
// head_dim 128 and long prompts (more than 256 tokens on average) only. The first step is a kernel of its own. The
// others are built from the parts of ../production/prefill_kernel.cuh; a step's file has what the step does
// differently: read that file beside them.
#pragma once

#include <span>

#include "../production/prefill_attention.h"

namespace stage7 {

struct PromptStep {
  const char* name;
  bool (*serves)(const PageShape& shape);  // whether this device can run it
  // tasks: plan_ragged's result. queries, output: [num_tokens, num_heads, head_dim].
  void (*attend)(const Pages& pages, const Batch& batch, const void* queries, void* output,
                 const RaggedWorkspace& tasks, cudaStream_t stream);
};

std::span<const PromptStep> prompt_ladder();

extern const PromptStep kPromptMma;
extern const PromptStep kPromptWgmma;
extern const PromptStep kPromptOverlap;
extern const PromptStep kPromptDiagonal;

}  // namespace
