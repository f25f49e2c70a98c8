// Prompts, step 4: short tiles on the diagonal. The kernel that the stage uses (../production/prefill_kernel.cuh).
//
// A task's rows may see only one token of their last tile, or all 128. The tile's products are as short as possible, in
// steps of 32 tokens; wgmma has an instruction for each length. With a group of 4, a task is 32 tokens of the prompt,
// and saves 48 of the last tile's 128 on average.
//
// flops: as step 1 counts them, because masked scores are no part of the result. For a prompt of 512 tokens, the kernel
// computes 272 tokens for each row instead of 320; rows see 256 on average.
// measured: 1x8192 548 Tflop/s, 4x2048 489, 16x512 292 on an NVIDIA H200, 2026-11-22
//
// Why it is faster: short prompts compute fewer scores that are masked afterwards. Where it is not: a prompt of 8,192
// tokens, where the diagonal is one tile of 32.
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
