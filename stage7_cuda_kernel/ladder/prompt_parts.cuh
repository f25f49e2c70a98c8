// What the steps of the prompts' ladder share: the checks, and the launch of a kernel whose argument is a PrefillCall.
#pragma once

#include "../kernels/checks.h"
#include "../production/prefill_launch.cuh"
#include "../production/production_kernels.h"
#include "prompt_ladder.h"

namespace stage7 {

inline constexpr int kPromptDimensions = 128;

inline void check_prompts(const Pages& pages, const Batch& batch) {
  check_pages(kProductionKernels, pages);
  check_batch(kProductionKernels, pages.shape, batch);
  COMMON_CHECK(pages.shape.type == ScalarType::kBFloat16 && pages.shape.head_dim == kPromptDimensions,
               "the prompts' ladder is for bfloat16 and head_dim 128");
}

template <void (*kernel)(PrefillCall)>
void attend_prompts(const Pages& pages, const Batch& batch, const void* queries, void* output,
                    const RaggedWorkspace& tasks, cudaStream_t stream) {
  check_prompts(pages, batch);
  COMMON_CHECK(prefill_serves(pages.shape), "this step needs wgmma, and blocks of 16 tokens or more");
  launch_prefill<ScalarType::kBFloat16, kPromptDimensions>(kernel, prefill_call(pages, batch, queries, output, tasks),
                                                           tasks.num_tasks, stream);
}

}  // namespace
