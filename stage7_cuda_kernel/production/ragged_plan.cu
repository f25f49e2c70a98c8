// Lists the tasks of ragged attention, once for each step, on the device: the lengths never travel to the host.
//
// A causal task takes time in proportion to the tokens it sees. Thread blocks start in the order of the list, so the
// longest tasks stand first and the short ones fill the gaps at the end, when no full wave is left.
#include "../kernels/checks.h"
#include "attention_launches.h"
#include "common/cuda/runtime/launch.h"
#include "ragged_plan.h"
#include "supported_shapes.h"

namespace stage7 {
namespace {

constexpr int kThreads = 1024;

struct RaggedLengths {
  const int* query_starts;
  const int* context_lengths;
  int group;
  int rows;  // the rows of a task

  __device__ int num_queries(int s) const {
    return context_lengths[s] == 0 ? 0 : query_starts[s + 1] - query_starts[s];
  }
  __device__ int num_tasks(int s) const { return (num_queries(s) * group + rows - 1) / rows; }
  __device__ RaggedTask task(int s, int task) const {
    return {.sequence = s,
            .first_row = task * rows,
            .end_row = min((task + 1) * rows, num_queries(s) * group),
            .first_query = query_starts[s],
            .seen_by_first = context_lengths[s] - num_queries(s) + 1};
  }
  // The tokens that the task's last row sees, and so the task.
  __device__ int visible_tokens(int s, int task) const {
    const int last_row = min((task + 1) * rows, num_queries(s) * group) - 1;
    return context_lengths[s] - num_queries(s) + last_row / group + 1;
  }
};

// Sorts by length into kThreads buckets: exact enough, and one pass of counting suffices.
__global__ void __launch_bounds__(kThreads) plan(RaggedWorkspace workspace, RaggedLengths lengths, int num_sequences) {
  __shared__ int longest;
  __shared__ int places[kThreads];  // the number of tasks in each bucket, then where the bucket begins
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    longest = 1;
  }
  places[thread] = 0;
  __syncthreads();
  for (int s = thread; s < num_sequences; s += kThreads) {
    atomicMax(&longest, lengths.context_lengths[s]);
  }
  for (int i = thread; i < workspace.num_tasks; i += kThreads) {
    workspace.tasks[i] = {.sequence = -1};
  }
  __syncthreads();
  const auto bucket = [&](int visible) {  // 0 for the longest
    return kThreads - 1 - static_cast<int>(std::int64_t{visible} * (kThreads - 1) / longest);
  };
  // A warp lists a sequence, each lane a task.
  for (int s = thread / 32; s < num_sequences; s += kThreads / 32) {
    for (int task = thread % 32; task < lengths.num_tasks(s); task += 32) {
      atomicAdd(&places[bucket(lengths.visible_tokens(s, task))], 1);
    }
  }
  __syncthreads();
  const int own = places[thread];
  for (int distance = 1; distance < kThreads; distance *= 2) {
    const int before = thread >= distance ? places[thread - distance] : 0;
    __syncthreads();
    places[thread] += before;
    __syncthreads();
  }
  if (thread == kThreads - 1) {
    *workspace.queue = {.num_tasks = places[thread], .next = 0};
  }
  places[thread] -= own;
  __syncthreads();
  // The order inside a bucket is left to chance: no result depends on it.
  for (int s = thread / 32; s < num_sequences; s += kThreads / 32) {
    for (int task = thread % 32; task < lengths.num_tasks(s); task += 32) {
      const int place = atomicAdd(&places[bucket(lengths.visible_tokens(s, task))], 1);
      workspace.tasks[place] = lengths.task(s, task);
    }
  }
}

}  // namespace

std::size_t ragged_workspace_bytes(const PageShape& shape, const Batch& batch, int num_tokens) {
  check_batch(kProductionShapes, shape, batch);
  COMMON_CHECK(num_tokens >= 0, "a batch has no tokens or some");
  return ragged_workspace(nullptr, shape, batch, num_tokens).bytes;
}

void plan_ragged(const PageShape& shape, const Batch& batch, const int* query_starts, int num_tokens, void* workspace,
                 cudaStream_t stream) {
  check_batch(kProductionShapes, shape, batch);
  COMMON_CHECK(num_tokens >= 0, "a batch has no tokens or some");
  if (batch.num_sequences == 0 || num_tokens == 0) {
    return;
  }
  COMMON_CHECK(query_starts != nullptr, "a ragged batch has query_starts");
  COMMON_CHECK(workspace != nullptr && is_aligned(workspace), "a workspace is given");
  const RaggedLengths lengths{query_starts, batch.context_lengths, batch.num_heads / shape.num_kv_heads,
                              ragged_tile(shape.head_dim, prompts_are_short(shape, batch, num_tokens)).rows()};
  common::launch(plan, dim3(1), kThreads, 0, stream, common::Overlap::kNone,
                 ragged_workspace(workspace, shape, batch, num_tokens), lengths, batch.num_sequences);
}

}  // namespace
