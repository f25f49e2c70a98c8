#include "common/paged/windowed_kernels.h"

#include <algorithm>
#include <limits>

#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"

namespace common {
namespace {

constexpr int kThreads = 256;

// A step's lists in the workspace. A query is a row of the queries for one kv head; it has a sequence to itself.
struct RowLists {
  int num_queries;
  int window;         // no longer than a context can be
  int* query_starts;  // [num_queries + 1]: 0, 1, 2 …
  int* lengths;       // [num_queries]: of the window, or of the context if that is shorter; 0: inactive
  int* list_starts;   // [num_queries]: where in `rows` the query's window begins
  int* rows;          // for each sequence and kv head, what its queries see

  // workspace: bytes() bytes, or none to learn how many.
  RowLists(std::byte* workspace, const PageShape& shape, const StepArrays& step) {
    const std::int64_t longest = std::int64_t{step.batch.max_blocks_per_sequence} * shape.block_size;
    window = static_cast<int>(std::min<std::int64_t>(step.batch.window, longest));
    const std::int64_t queries = std::int64_t{step.num_tokens} * shape.num_kv_heads;
    // The first query of a sequence sees the window, and each further one a token more.
    num_rows_ = std::int64_t{step.batch.num_sequences} * (window - 1) * shape.num_kv_heads + queries;
    COMMON_CHECK(std::max(queries, num_rows_) < std::numeric_limits<int>::max(), "lists of rows have 32 bits");
    num_queries = static_cast<int>(queries);
    query_starts = reinterpret_cast<int*>(workspace);
    lengths = query_starts + num_queries + 1;
    list_starts = lengths + num_queries;
    rows = list_starts + num_queries;
  }
  std::size_t bytes() const { return (3 * static_cast<std::size_t>(num_queries) + 1 + num_rows_) * sizeof(int); }

 private:
  std::int64_t num_rows_;
};

// A thread block for each sequence and kv head.
__global__ void __launch_bounds__(kThreads) list_rows(PageShape shape, StepArrays step, RowLists lists) {
  const int num_kv_heads = shape.num_kv_heads;
  const int sequence = static_cast<int>(blockIdx.x) / num_kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % num_kv_heads;
  const int thread = static_cast<int>(threadIdx.x);
  const int first_query = step.query_starts[sequence];
  const int num_new = step.query_starts[sequence + 1] - first_query;
  const int length = step.batch.context_lengths[sequence];
  const int* table = step.batch.block_table(sequence);
  // The list begins where the first query's window does, which may be in front of position 0.
  const int begin = length - num_new + 1 - lists.window;
  const int list =
      num_kv_heads * (sequence * (lists.window - 1) + first_query) + kv_head * (lists.window - 1 + num_new);
  for (int position = max(begin, 0) + thread; position < length; position += kThreads) {
    const int block = table[position / shape.block_size];
    lists.rows[list + position - begin] =
        (block * num_kv_heads + kv_head) * shape.block_size + position % shape.block_size;
  }
  for (int i = thread; i < num_new; i += kThreads) {
    const int query = (first_query + i) * num_kv_heads + kv_head;
    const int seen = length > 0 ? length - num_new + 1 + i : 0;
    const int hidden = max(seen - lists.window, 0);
    lists.lengths[query] = seen - hidden;
    lists.list_starts[query] = list + hidden - begin;
  }
  // Each query by itself; those behind the last sequence are inactive.
  const int end = step.query_starts[step.batch.num_sequences] * num_kv_heads;
  const int stride = static_cast<int>(gridDim.x) * kThreads;
  for (int query = static_cast<int>(blockIdx.x) * kThreads + thread; query <= lists.num_queries; query += stride) {
    lists.query_starts[query] = query;
    if (query >= end && query < lists.num_queries) {
      lists.lengths[query] = 0;
      lists.list_starts[query] = 0;
    }
  }
}

}  // namespace

std::size_t WindowedKernels::workspace_bytes(const PageShape& shape, const StepArrays& largest) const {
  if (largest.batch.window == 0) {
    return kernels_.workspace_bytes(shape, largest);
  }
  check_step(*this, shape, largest);
  return RowLists(nullptr, shape, largest).bytes();
}

void WindowedKernels::plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> workspace,
                           cudaStream_t stream) const {
  if (step.batch.window == 0) {
    kernels_.plan(shape, step, workspace, stream);
    return;
  }
  check_step(*this, shape, step);
  if (step.batch.num_sequences == 0 || step.num_tokens == 0) {
    return;
  }
  COMMON_CHECK(workspace_bytes(shape, step) <= workspace.size(), "the workspace has room for the step");
  launch(list_rows, dim3(static_cast<unsigned>(step.batch.num_sequences * shape.num_kv_heads)), kThreads, 0, stream,
         Overlap::kNone, shape, step, RowLists(workspace.data(), shape, step));
}

void WindowedKernels::attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
                             std::span<std::byte> workspace, cudaStream_t stream) const {
  if (step.batch.window == 0) {
    kernels_.attend(pages, step, rows, output, workspace, stream);
    return;
  }
  const PageShape& shape = pages.shape;
  check_pages(*this, pages);
  check_step(*this, shape, step);
  if (step.batch.num_sequences == 0 || step.num_tokens == 0) {
    return;
  }
  COMMON_CHECK(workspace_bytes(shape, step) <= workspace.size(), "the workspace has room for the step");
  COMMON_CHECK(rows.queries != nullptr && output != nullptr, "queries and output are given");
  COMMON_CHECK(is_aligned(rows.queries) && is_aligned(output), "queries and output begin at multiples of 16 bytes");
  if (rows.keys != nullptr) {
    write_to_slots(pages, rows.keys, rows.values, rows.row_stride, step.slot_mapping, step.num_tokens, stream);
  }
  const RowLists lists(workspace.data(), shape, step);
  const PageShape blocks_of_a_row{.num_blocks = shape.num_blocks * shape.num_kv_heads * shape.block_size,
                                  .num_kv_heads = 1,
                                  .block_size = 1,
                                  .head_dim = shape.head_dim,
                                  .type = shape.type};
  const StepArrays by_query{.batch = {.num_sequences = lists.num_queries,
                                      .num_heads = step.batch.num_heads / shape.num_kv_heads,
                                      .context_lengths = lists.lengths,
                                      .block_tables = lists.rows,
                                      .table_starts = lists.list_starts,
                                      .max_blocks_per_sequence = lists.window},
                            .num_decodes = lists.num_queries,
                            .num_tokens = lists.num_queries,
                            .query_starts = lists.query_starts};
  kernels_.attend({pages.keys, pages.values, blocks_of_a_row}, by_query, {.queries = rows.queries}, output, {}, stream);
}

}  // namespace common
