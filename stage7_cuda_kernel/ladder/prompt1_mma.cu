// Prompts, step 1: mma.sync, the matrix instruction of all chips since Ampere. The kernel is
// ../production/ragged_kernel.cuh, which the stage still uses for other chips, for short prompts and for other head
// sizes.
//
// A thread block has 128 rows (a row is one query head of one token), 32 for each of its four warps, and walks the
// tokens that these rows see in tiles of 64. Copies of the next tile are in flight while one is computed, and two
// thread blocks share a multiprocessor, so that one multiplies while the other computes its softmax.
//
// flops for one prompt of 8,192 tokens, 32 heads of 128 dimensions: 4 * 32 * 128 * 8,192^2 / 2 = 550 G. bytes: a tile
// of K and V serves 128 rows, 128 flops for each byte that comes from L2; memory is not the limit.
// measured: 1x8192 341 Tflop/s, 4x2048 290, 16x512 191 on an NVIDIA H200, 2026-11-22
//
// Why it is slow: the device could do 750 (production/KERNELS.md, "Where the machine's numbers come from"). An mma has
// 16 rows and reads both operands from registers. A warp first fetches all of K and V that it multiplies from shared
// memory; that costs instructions, and registers that its output needs.
#include "prompt_parts.cuh"

namespace stage7 {
namespace {

bool serves(const PageShape& /*shape*/) { return true; }

void attend(const Pages& pages, const Batch& batch, const void* queries, void* output, const RaggedWorkspace& tasks,
            cudaStream_t stream) {
  check_prompts(pages, batch);
  mma_attention(pages, batch, queries, output, tasks, false, stream);
}

}  // namespace

const PromptStep kPromptMma = {"1 mma", serves, attend};

}  // namespace
