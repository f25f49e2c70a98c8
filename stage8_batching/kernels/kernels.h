// The CUDA kernels behind plain pointers: no Eigen, no templates, no nvcc needed to call them.
//
// All pointers are device pointers unless said otherwise. Every function checks its arguments on the host and throws
// common::CheckError before anything is launched; allocates nothing; enqueues on `stream` and returns at once; and may
// be captured in a CUDA graph. What changes from step to step (lengths, tables, slots) is read on the device, so a
// captured graph stays valid as long as the pointers and the counts given here do.
//
// Two families. Bfloat16 and float8 K and V are read for tensor cores, in tiles of certain sizes only. Float32 is the
// exact path for comparisons with the CPU: any block size, slow.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/cuda/host_device.h"
#include "page_shape.h"

namespace stage8 {

struct Pages {
  void* keys = nullptr;
  void* values = nullptr;  // not used if the shape is paired
  PageShape shape;
};

// Empty if the kernels below can serve num_heads query heads over such pages; else one line for the user that says what
// they cannot do. All of them refuse what is named here.
std::string unsupported(const PageShape& shape, int num_heads);

// Copies row i of keys and of values, [num_tokens, num_kv_heads * head_dim] of row_type(pages' type), to slot
// slot_mapping[i]; slot -1 skips the row. Rows begin row_stride elements apart, so that K and V may lie side by side
// in one matrix; pointers and strides are multiples of 16 bytes. The kernel may start while the launch before it in the
// stream still runs, but reads and writes nothing until that one has finished. Float8 is rounded to, once, here.
void write_to_slots(const Pages& pages, const void* keys, const void* values, std::int64_t row_stride,
                    const int* slot_mapping, int num_tokens, cudaStream_t stream);

// The rows of the slots back in the plain order, for tests. What float8 stands for is a bfloat16 number, so nothing is
// rounded.
void read_from_slots(const Pages& pages, void* keys, void* values, std::int64_t row_stride, const int* slot_mapping,
                     int num_tokens, cudaStream_t stream);

struct PageCopy {
  int source = 0;
  int destination = 0;
};

// Copies whole blocks in all layers at once. keys, values (unless paired): [num_layers, shape...]. copies: on the host;
// the launch takes the list along, so it may be gone when this returns (and a captured graph repeats it). No block may
// be the destination of two copies, or the destination of one and the source of another: the copies run side by side.
void copy_blocks(void* keys, void* values, int num_layers, const PageShape& shape, const PageCopy* copies,
                 int num_copies, cudaStream_t stream);

// A batch as flat arrays. A sequence of context_length 0 is inactive: its rows of the output stay untouched.
struct Batch {
  int num_sequences = 0;
  int num_heads = 0;                     // num_kv_heads times 1 to 16 (float32: times anything)
  const int* context_lengths = nullptr;  // [num_sequences], the new tokens included
  const int* block_tables = nullptr;     // one after the other: at least ceil(context_length / block_size) blocks each
  const int* table_starts = nullptr;     // [num_sequences]: where each one's table begins
  int max_blocks_per_sequence = 0;       // no table is longer: all that the host knows of the lengths

  COURSE_HOST_DEVICE const int* block_table(int sequence) const { return block_tables + table_starts[sequence]; }
};

// How decode attention shares its work out. The rule decides unless a test or a measurement asks for something else.
struct DecodeOptions {
  int num_workers = 0;  // thread blocks that share the work; 0: as many as the device holds at once
  // The kernel may start while the launch before it in the stream still runs, and reads queries and new rows only when
  // that one has finished. The plan, the tables, the lengths and the pages it reads at once: what writes them must have
  // finished before the launch before this one can start. In a model's step that launch computes the queries.
  bool overlap_previous = false;
};

// K and V of a decode batch's tokens, for decode attention to store: what write_to_slots would do in a launch of its
// own. Row i, [num_kv_heads * head_dim] of row_type(pages' type), goes to slot slot_mapping[i], which is that of
// position context_length - 1; slot -1: it is not stored, but seen. Pointers and strides as in write_to_slots.
struct NewRows {
  const void* keys = nullptr;  // nullptr: there are none, and the pages have all positions
  const void* values = nullptr;
  std::int64_t row_stride = 0;
  const int* slot_mapping = nullptr;  // [num_sequences]
};

// Decode attention works in two steps. plan_decode, called once for each step, cuts the work of one layer into
// equal shares; decode_attention, called for each layer, does it. Both take the same batch, shape and options, and the
// same workspace. Float32 needs neither plan nor workspace (0 bytes, may be null).
std::size_t decode_workspace_bytes(const PageShape& shape, const Batch& batch, const DecodeOptions& options = {});
void plan_decode(const PageShape& shape, const Batch& batch, void* workspace, cudaStream_t stream,
                 const DecodeOptions& options = {});

// queries, output: [num_sequences, num_heads * head_dim], of row_type(pages' type); one token for each sequence, which
// sees all context_length positions. Query head h reads kv head h / (num_heads / num_kv_heads). Scores are scaled by 1
// / sqrt(head_dim). The last position's K and V are in the pages, or new rows.
void decode_attention(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
                      cudaStream_t stream, const DecodeOptions& options = {}, const NewRows& new_rows = {});

// Causal attention of a ragged batch: prompts, chunks of prompts and single tokens side by side. Sequence s has the
// query rows query_starts[s] … query_starts[s + 1] - 1 (query_starts: [num_sequences + 1]), which are the last tokens
// of its context. queries, output: [num_tokens, num_heads * head_dim]; num_tokens is at least query_starts' last entry.
// query_starts[0] is 0; no sequence has more rows than context. workspace: filled by plan_ragged, once for each
// step; not needed for float32. Work is shared out by query rows, never along the context: a sequence with one token is
// computed, but its whole context is then walked by one thread block for each kv head. decode_attention is made for
// that.
std::size_t ragged_workspace_bytes(const PageShape& shape, const Batch& batch, int num_tokens);
void plan_ragged(const PageShape& shape, const Batch& batch, const int* query_starts, int num_tokens, void* workspace,
                 cudaStream_t stream);
void ragged_attention(const Pages& pages, const Batch& batch, const int* query_starts, const void* queries,
                      void* output, int num_tokens, const void* workspace, cudaStream_t stream);

}  // namespace
