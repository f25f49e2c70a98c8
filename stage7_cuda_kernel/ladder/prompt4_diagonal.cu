// Prompts, step 4: short tiles on the diagonal. The kernel that the stage uses (../production/prefill_kernel.cuh).
//
// Of the last tile that a task's rows see, they may see one token or all 128. Its products are as short as that allows,
// in steps of 32 tokens; wgmma has an instruction for each. With a group of 4, a task is 32 tokens of the prompt, and
// saves 48 of the last tile's 128 on average.
//
// flops: as step 1 counts them, since what is masked is no part of the result. Computed are, for a prompt of 512
// tokens, 272 tokens for each row in place of 320; rows see 256.
// measured: 1x8192 548 Tflop/s, 4x2048 489, 16x512 292 on an NVIDIA H200, 2026-11-22
//
// Why it is faster: short prompts compute less that is masked afterwards. Where it is not: one of 8,192 tokens, where
// the diagonal is one tile of 32.
#include "prompt_parts.cuh"

namespace stage7 {
namespace {

void attend(const Pages& pages, const Batch& batch, const void* queries, void* output, const RaggedWorkspace& tasks,
            cudaStream_t stream) {
  check_prompts(pages, batch);
  prefill_attention(pages, batch, queries, output, tasks, stream);
}

}  // namespace

const PromptStep kPromptDiagonal = {"4 short tiles on the diagonal", prefill_serves, attend};

}  // namespace
