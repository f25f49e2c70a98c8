// How ragged attention's work is shared out. A thread block gets consecutive rows of one kv head of one sequence, where
// a row is one query head of one token: row r is token r / group, query head r % group of the kv head's group. So all
// heads of a group share every K and V that is loaded, and a chunk of few tokens fills more of a tensor core's 16 rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/paged/attention_launches.h"
#include "common/paged/page_layout.h"
#include "common/paged/paged_kernels.h"
#include "common/paged/ragged_tile.h"

namespace common {

// The shape as a constant, for device code.
template <int kHeadDim, bool kShort>
struct RaggedTileOf {
  static constexpr RaggedTile kTile = ragged_tile(kHeadDim, kShort);
};

// A context is cut at multiples of this number of tokens, which is a whole number of every kernel's tiles.
inline constexpr int kPartTokens = 128;

// 48 bytes: what a thread block needs to know before its first copy.
struct alignas(16) RaggedTask {
  int sequence;       // -1: nothing to do
  int first_row;      // the task's first row
  int end_row;        // one past the task's last row
  int first_query;    // the sequence's first row of the queries
  int seen_by_first;  // tokens that the sequence's first row sees
  // The task's part of the context. The first part begins with the tile in which the first row's window begins, others
  // at a multiple of kPartTokens. The last part ends with what the last row sees.
  int first_token;
  int end_token;
  int part;
  int num_parts;    // into how many parts the context is cut; 1: the task writes the output
  int first_place;  // counted over the parts of one kv head, where the parts before this context's first are
  int is_prefix;    // 1: the rows are several sequences' (shared_plan.h), which see more tokens than this task's
  int num_hidden;   // the part's first tokens, less than a tile, which are in front of the first row's window

  // Whether the task stores its result as a part, to be joined with others.
  COURSE_HOST_DEVICE bool is_partial() const { return num_parts > 1 || is_prefix != 0; }
};

// The tasks that are left, for thread blocks that do one task after the other (prefill_kernel.cuh).
struct alignas(16) RaggedQueue {
  int num_tasks;   // how many tasks exist
  int next;        // the next task, counted over all kv heads; 0 between launches
  int num_merges;  // how many rows of tasks have a context that is cut
};

// The results of parts: a place for each part and kv head, as many rows as a task has. Not yet divided by the sum.
struct RaggedPartials {
  float* outputs;       // [num_places, rows, head_dim]
  float2* max_and_sum;  // [num_places, rows]: largest score, sum of weights; the sum of a row that sees nothing is 0

  static COURSE_HOST_DEVICE std::int64_t place_of(const RaggedTask& task, int part, int kv_head, int num_kv_heads) {
    return std::int64_t{task.first_place} * num_kv_heads + kv_head * task.num_parts + part;
  }
};

// What host and device know of a step before the plan is made.
struct RaggedShape {
  RaggedKernel kernel;
  int rows;         // of a task
  int num_workers;  // thread blocks that the device holds at once
  int max_tasks;    // parts included
  int max_places;   // for parts; 0: no context is cut, and there is nothing to merge
  int part_tokens;  // 0: the plan decides how long parts are
};

struct RaggedWorkspace {
  RaggedQueue* queue;
  RaggedTask* tasks;   // [max_tasks]; the longest come first
  RaggedTask* merges;  // [max_places / 2]: part 0 of each context that is cut, in any order
  RaggedPartials partials;
  RaggedShape shape;
  std::size_t bytes;
};

// Computes the tasks of a plan; parts are not joined. order: nullptr, or row r of a task's queries is number
// order[first_query + r / group] of `queries`; then all tasks are partial, and there is no output, and the kernel may
// start while the previous launch still runs, which may write the queries and nothing else that is read or written
// here. beside_previous: see RaggedOptions.
void attend_tasks(const Pages& pages, const BatchArrays& batch, const void* queries, const int* order, void* output,
                  const RaggedWorkspace& workspace, bool beside_previous, cudaStream_t stream);

// Whether RaggedKernel::kWarpgroups is compiled for this device and serves these pages.
bool has_warpgroups(const PageShape& shape);

// From numbers that the host knows; equal arguments give equal places.
RaggedWorkspace ragged_workspace(void* memory, const PageShape& shape, const BatchArrays& batch, int num_tokens,
                                 const RaggedOptions& options = {});

}  // namespace common
