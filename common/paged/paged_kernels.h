// The CUDA kernels behind plain pointers: no Eigen, no templates, no nvcc needed to call them.
//
// All pointers are device pointers unless said otherwise. Every function checks its arguments on the host and throws
// common::CheckError before anything is launched; allocates nothing; enqueues on `stream` and returns at once; and may
// be captured in a CUDA graph. What changes from step to step (lengths, tables, slots) is read on the device, so a
// captured graph stays valid as long as the pointers and the counts given here do.
//
// A runner is given a table of kernels, PagedKernels. A stage has one in its folder kernels/, which is plain: for any
// block size and any group, on every GPU. production_kernels.h has another: faster, for fewer shapes, and for float8
// too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/cuda/host_device.h"
#include "common/paged/page_shape.h"

namespace common {

// One layer's K and V.
struct Pages {
  void* keys = nullptr;
  void* values = nullptr;  // not used if the shape is paired
  PageShape shape;
};

// Sequences as flat arrays. A sequence with context_length 0 is inactive: its rows of the output stay untouched.
struct BatchArrays {
  int num_sequences = 0;
  int num_heads = 0;                     // query heads: a multiple of num_kv_heads
  const int* context_lengths = nullptr;  // [num_sequences]; the new tokens are included
  const int* block_tables = nullptr;     // one after the other: at least ceil(context_length / block_size) blocks each
  const int* table_starts = nullptr;     // [num_sequences]: where each sequence's table begins
  int max_blocks_per_sequence = 0;       // no table is longer; the host knows nothing else about the lengths
  int window = 0;                        // a query sees the last `window` tokens, its own included; 0: all

  COURSE_HOST_DEVICE const int* block_table(int sequence) const { return block_tables + table_starts[sequence]; }
  // How many of a sequence's first `seen` tokens, the last of them the query's own, lie in front of its window.
  COURSE_HOST_DEVICE int num_hidden(int seen) const { return window > 0 && seen > window ? seen - window : 0; }
};

// A step: each sequence of the batch with its new tokens, the last tokens of its context. Sequence s has the rows
// query_starts[s] … query_starts[s + 1] - 1 of queries, K, V and output; no sequence has more rows than its context.
struct StepArrays {
  BatchArrays batch;
  int num_decodes = 0;                // the first num_decodes sequences have one row each: row s is sequence s's
  int num_tokens = 0;                 // rows: at least the last entry of query_starts
  const int* query_starts = nullptr;  // [num_sequences + 1], from 0 on
  const int* slot_mapping = nullptr;  // [num_tokens]: the slot of each token's K and V; -1: they are not stored
};

// What the model has computed of a step's tokens in one layer, of row_type(pages' type). Rows of K and V begin
// row_stride elements apart, so that the two may lie side by side in one matrix; pointers and strides are multiples of
// 16 bytes.
struct LayerRows {
  const void* queries = nullptr;  // [num_tokens, num_heads * head_dim]
  const void* keys = nullptr;     // [num_tokens, num_kv_heads * head_dim]; nullptr: K and V are in their slots already
  const void* values = nullptr;   // as keys
  std::int64_t row_stride = 0;
};

// K and V of block `source`, in all layers, have to be copied to block `destination`.
struct PageCopy {
  int source = 0;
  int destination = 0;
};

class PagedKernels {
 public:
  virtual ~PagedKernels() = default;

  // Empty if these kernels can serve num_heads query heads over such pages; else one line for the user that says why
  // not. Every function refuses what is named here.
  virtual std::string unsupported(const PageShape& shape, int num_heads) const = 0;

  // Whether these kernels serve a batch with a window; if not, they refuse it. A block that lies wholly in front of the
  // window of its sequence's first query is not read: its table entry and its slots may hold anything.
  virtual bool has_windows() const { return false; }

  // Copies row i of keys and row i of values (see LayerRows) to slot slot_mapping[i]; slot -1 skips the row.
  virtual void write_to_slots(const Pages& pages, const void* keys, const void* values, std::int64_t row_stride,
                              const int* slot_mapping, int num_tokens, cudaStream_t stream) const = 0;

  // Copies the rows of the slots back, in the plain order. For tests.
  virtual void read_from_slots(const Pages& pages, void* keys, void* values, std::int64_t row_stride,
                               const int* slot_mapping, int num_tokens, cudaStream_t stream) const = 0;

  // Copies whole blocks in all layers at once. keys, values (unless paired): [num_layers, shape...]. copies lies on the
  // host; the list is a parameter of the launch, so the caller may free it when this returns, and a captured graph
  // repeats the same copies. No block may be the destination of two copies, or the destination of one and the source of
  // another: the copies run concurrently.
  virtual void copy_blocks(void* keys, void* values, int num_layers, const PageShape& shape, const PageCopy* copies,
                           int num_copies, cudaStream_t stream) const = 0;

  // The memory that plan() and attend() need for any step whose counts do not exceed `largest`'s.
  virtual std::size_t workspace_bytes(const PageShape& shape, const StepArrays& largest) const = 0;

  // Prepares attend(): called once for each step, for all layers. The workspace begins at a multiple of 256 bytes.
  virtual void plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> workspace,
                    cudaStream_t stream) const = 0;

  // Stores K and V of the step's tokens in their slots, then computes causal attention: a token sees its own sequence
  // up to itself, as far back as its window reaches. output: as queries. Query head h reads kv head
  // h / (num_heads / num_kv_heads). Scores are scaled by 1 / sqrt(head_dim). The launch before this one in the stream
  // may write `rows` and nothing else that is read here: the kernels may start while it still runs.
  virtual void attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
                      std::span<std::byte> workspace, cudaStream_t stream) const = 0;
};

}  // namespace common
