// Step 7: equal shares. The kernel that the stage uses; its parts are in ../production.
//
// All tiles of all heads of all sequences stand in one line, and n thread blocks, as many as the device holds at once,
// get the n-th part each (decode_plan.h has a picture). A share may begin in the middle of one head and end in another
// one, so no thread block waits for the longest sequence, and no second round of thread blocks runs half empty. The
// plan is made on the device, once for each decode step, for all layers.
//
// The results of a head that was cut are collected in the workspace. An atomic counter shows which thread block is the
// last to store its result, and that one merges them: the second launch is gone. A launch may also begin while the
// previous one still ends (programmatic dependent launch), so that tables and plan are read by the time K and V may be.
//
// bytes for 32 x 8,192: 1.07 GB, each once, and at most two partial results of 2 KB (a group of 4) for each thread
// block: 1 MB. flops: 4.3 G.
// measured: 1x8192 12.7 us (58%), 32x8192 249 us (94%), 32xragged 221 us (91%) on an NVIDIA H200, 2026-11-22
//
// Why it is faster: for ragged batches by the balance, for small ones by the merge. What it costs: the plan, 4 us for
// each step. And a merge in the same launch is slower than a second launch if one thread block reads the results of
// many one after the other, 600 ns each; so it loads eight of them at once (merge_contributors). Slower alternatives:
// one head for each thread block where heads are few; cutting heads that need not be cut, since a thread block that
// ends in another head stores two results; many small thread blocks where every head is cut, because the cost of the
// merge is the number of partial results (decode_ring.h has the rule).
#include "../production/attention_launches.h"
#include "ladder_parts.cuh"

namespace stage7 {
namespace {

std::size_t workspace_bytes(const PageShape& shape, const Batch& batch) {
  check_ladder(shape, batch);
  return decode_workspace_bytes(shape, batch);
}

void plan(const PageShape& shape, const Batch& batch, void* workspace, cudaStream_t stream) {
  plan_decode(shape, batch, workspace, stream);
}

void decode(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  check_ladder(pages.shape, batch);
  decode_attention(pages, batch, queries, output, workspace, stream, {.overlap_previous = true});
}

}  // namespace

const LadderStep kBalanced = {"7 balanced", workspace_bytes, plan, decode};

}  // namespace
