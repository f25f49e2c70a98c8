// The second ladder: causal attention of prompts, from Ampere's matrix instruction to the kernel that Hopper runs.
//
// A step takes what ragged_attention takes, after plan_ragged (attention_launches.h), but bfloat16, head_dim 128 and
// prompts that are long (more than 256 tokens on average). The first step is a kernel by itself. The others are made of
// the parts of
// ../production/prefill_kernel.cuh, and what a step does differently is in its file: read that one beside them.
#pragma once

#include <span>

#include "../production/prefill_attention.h"

namespace stage7 {

struct PromptStep {
  const char* name;
  bool (*serves)(const PageShape& shape);  // whether this device can run it
  // tasks: what plan_ragged has made. queries, output: [num_tokens, num_heads, head_dim].
  void (*attend)(const Pages& pages, const Batch& batch, const void* queries, void* output,
                 const RaggedWorkspace& tasks, cudaStream_t stream);
};

std::span<const PromptStep> prompt_ladder();

extern const PromptStep kPromptMma;
extern const PromptStep kPromptWgmma;
extern const PromptStep kPromptOverlap;
extern const PromptStep kPromptDiagonal;

}  // namespace
