// How ragged attention's work is shared out. A thread block gets consecutive rows of one kv head of one sequence, where
// a row is one query head of one token: row r is token r / group, query head r % group of the kv head's group. So all
// heads of a group share every K and V that is loaded, and a chunk of few tokens fills more of a tensor core's 16 rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../kernels/kernels.h"
#include "../kernels/page_layout.h"

namespace stage8 {

// The sizes of a thread block's work.
struct RaggedTile {
  int warps;
  int rows_per_warp;  // query rows; an mma multiplies 16
  int tokens;         // of a tile of K, and of V
  int stages;         // tiles in shared memory
  int resident;       // thread blocks that a multiprocessor holds at once

  COURSE_HOST_DEVICE constexpr int rows() const { return warps * rows_per_warp; }
};

// There are two shapes. For long prompts, a warp has 32 rows and multiplies every vector of K and V that it fetches
// from shared memory with two blocks of 16 rows; the output of 32 rows of 128 dimensions takes half of the registers,
// so a multiprocessor holds two thread blocks. Short prompts end after a few tiles: with fewer rows a warp, more thread
// blocks wait for their first tile at the same time, and fewer rows of a diagonal tile see nothing.
constexpr RaggedTile ragged_tile(int head_dim, bool is_short) {
  if (head_dim > 128) {
    return {4, 16, 64, 2, 1};
  }
  return is_short ? RaggedTile{4, 16, 32, 2, 4} : RaggedTile{4, 32, 64, 2, 2};
}

// The shape as a constant, for device code.
template <int kHeadDim, bool kShort>
struct RaggedTileOf {
  static constexpr RaggedTile kTile = ragged_tile(kHeadDim, kShort);
};

// 32 bytes, read as two 16-byte loads: all that a thread block needs to know before its first copy.
struct alignas(16) RaggedTask {
  int sequence;       // -1: nothing to do
  int first_row;      // the task's first row
  int end_row;        // one past the task's last row
  int first_query;    // the sequence's first row of the queries
  int seen_by_first;  // tokens that the sequence's first row sees
  int unused[3];
};

// The tasks that are left, for thread blocks that do one task after the other (prefill_kernel.cuh).
struct alignas(16) RaggedQueue {
  int num_tasks;  // how many tasks exist
  int next;       // the next task, counted over all kv heads; 0 between launches
};

struct RaggedWorkspace {
  RaggedQueue* queue;
  RaggedTask* tasks;  // [num_tasks]; those that see the most tokens come first
  int num_tasks;      // the room for tasks, from numbers that the host knows
  std::size_t bytes;
};

// The lengths are known on the device only, so their average decides. Measured on an H200, 32 query heads over 8 kv
// heads of 128 dimensions: 64 prompts of 128 tokens run 12 % faster in the short shape, 16 prompts of 512 tokens 5 %
// slower.
inline bool prompts_are_short(const PageShape& shape, const Batch& batch, int num_tokens) {
  return shape.head_dim <= 128 && num_tokens <= std::int64_t{256} * batch.num_sequences;
}

inline RaggedWorkspace ragged_workspace(void* memory, const PageShape& shape, const Batch& batch, int num_tokens) {
  const int rows = ragged_tile(shape.head_dim, prompts_are_short(shape, batch, num_tokens)).rows();
  const std::int64_t num_rows = std::int64_t{num_tokens} * (batch.num_heads / shape.num_kv_heads);
  // Every sequence may leave one task partly filled.
  const std::int64_t num_tasks = num_rows / rows + batch.num_sequences;
  // Fewer tokens may be cut into the shorter tiles and then make more tasks: there is room for these too.
  const std::int64_t max_tasks =
      num_rows / ragged_tile(shape.head_dim, shape.head_dim <= 128).rows() + batch.num_sequences;
  auto* queue = static_cast<RaggedQueue*>(memory);
  return {queue, memory == nullptr ? nullptr : reinterpret_cast<RaggedTask*>(queue + 1), static_cast<int>(num_tasks),
          sizeof(RaggedQueue) + static_cast<std::size_t>(max_tasks) * sizeof(RaggedTask)};
}

}  // namespace
