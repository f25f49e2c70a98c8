// The ladder: seven kernels for one job, decode attention over pages. Each adds one idea to the one before.
//
// A step has the arguments of decode_attention (production/attention_launches.h), but supports bfloat16, head_dim 128
// and blocks of 16 tokens only, so that nothing but the idea is in its file. Read them in order; `bench --ladder`
// measures them side by side.
#pragma once

#include <cstddef>
#include <span>

#include "../kernels/kernels.h"

namespace stage7 {

struct LadderStep {
  const char* name;
  std::size_t (*workspace_bytes)(const PageShape& shape, const Batch& batch);
  // Called once for each decode step, and finished before `decode` begins; null if there is nothing to plan.
  void (*plan)(const PageShape& shape, const Batch& batch, void* workspace, cudaStream_t stream);
  // Called once for each layer. Argument checks, errors and context_length 0: as decode_attention.
  void (*decode)(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
                 cudaStream_t stream);
};

std::span<const LadderStep> ladder();

extern const LadderStep kNaive;
extern const LadderStep kCoalesced;
extern const LadderStep kOnlineSoftmax;
extern const LadderStep kSplit;
extern const LadderStep kGroup;
extern const LadderStep kTensorCores;
extern const LadderStep kBalanced;

}  // namespace
