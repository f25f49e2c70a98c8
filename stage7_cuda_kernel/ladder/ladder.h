// The ladder: seven kernels for one job, decode attention over pages. Each adds one idea to the one before, and has a
// file of its own, where all of it stands: the walk through a context, the arithmetic, the launch. What no step is
// about is in ladder_call.cuh. The last row is the kernel of common/paged/.
//
// The steps serve bfloat16, head_dim 128, blocks of 16 tokens and groups of up to 8 query heads only, so that nothing
// but the idea is in a file. Read them in order, each as its difference to the one before:
//
//     python3 tests/stage_diff.py ladder 2 3
//
// The head of a file has bytes and flops of an example, what was measured (at a commit; the machine code has not
// changed since), and the reasons. Instructions are counted in the loops that `nvcc -cubin -arch=sm_90a` and `nvdisasm
// -c` print, CUDA 13.0; a profiler counts a little more (LADDER.md, part 4).
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <span>

#include "../kernels/kernels.h"

namespace stage7 {

// What the ladder's kernels read, multiply and write.
using Element = __nv_bfloat16;

// Where the vectors of a row lie in the part of a block that one kv head has: one row after the other, as on the CPU
// (kPlain), or in the order of swizzled_pages.h (kSwizzled), which copies of whole pages need.
enum class RowOrder { kPlain, kSwizzled };

struct LadderStep {
  const char* name;
  std::size_t (*workspace_bytes)(const PageShape& shape, const BatchArrays& batch);
  // Called once for each decode step, and finished before `decode` begins; null if there is nothing to plan.
  void (*plan)(const PageShape& shape, const BatchArrays& batch, void* workspace, cudaStream_t stream);
  // Called once for each layer. Leaves the rows of a sequence with context_length 0 as they are. The launch before it
  // in the stream may write the queries, and nothing else that is read here.
  void (*decode)(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
                 cudaStream_t stream);
  RowOrder rows = RowOrder::kPlain;  // of the pages that it reads
  int min_capability = 80;           // the compute capability that it needs, times 10
};

std::span<const LadderStep> ladder();

extern const LadderStep kNaive;
extern const LadderStep kCoalesced;
extern const LadderStep kOnlineSoftmax;
extern const LadderStep kSplit;
extern const LadderStep kGroup;
extern const LadderStep kTensorCores;
extern const LadderStep kBalanced;
extern const LadderStep kProduction;  // with COURSE_PRODUCTION

}  // namespace
