// The two kinds of attention behind the table of production_kernels.h, each with its plan: decode attention for
// sequences with one new token, ragged attention for chunks of prompts. What paged_kernels.h says about all functions
// holds here too.
#pragma once

#include "common/paged/paged_kernels.h"

namespace common {

// How decode attention shares out its work. The defaults are used unless a test or a measurement sets something else.
struct DecodeOptions {
  int num_workers = 0;  // thread blocks that share the work; 0: as many as the device holds at once
  // How many multiprocessors to use; 0: all. With fewer, each has one large thread block, and the next launch can have
  // the others.
  int num_multiprocessors = 0;
  // The kernel may start while the previous launch in the stream still runs, and reads queries and new rows only after
  // the previous launch has finished. It reads the plan, the tables, the lengths and the pages at once: whatever writes
  // these must have finished before the previous launch can start. In a model's step, that launch computes the queries.
  bool overlap_previous = false;
};

// K and V of a decode batch's tokens, which decode attention stores; write_to_slots would need a launch of its own. Row
// i, [num_kv_heads * head_dim] of row_type(pages' type), goes to slot slot_mapping[i], the slot of position
// context_length - 1; with slot -1 the row is seen, but not stored. Pointers and strides as in write_to_slots.
struct NewRows {
  const void* keys = nullptr;  // nullptr: there are no new rows; the pages have all positions
  const void* values = nullptr;
  std::int64_t row_stride = 0;
  const int* slot_mapping = nullptr;  // [num_sequences]
};

// Where a sequence's results over the prefix that it shares with others are: places of RaggedPartials, one after the
// other for the parts of the prefix.
struct alignas(16) PrefixRows {
  int first_place = 0;  // as RaggedTask::first_place
  int num_parts = 0;    // 0: the sequence shares nothing
  int row = 0;          // in each place, the row of the group's first query head
  int unused = 0;
};

// Float8: the maxima in PrefixResults are stored this much too low (scores count powers of 2), sums and outputs 2^40
// times as large. Decode attention's maxima are those of score + exponent of V's scale, which is at least -40
// (float8.cuh): relative to the prefix's own maximum, float16 would have no weights if V is small.
inline constexpr int kFloat8PrefixLowered = 40;

// What an earlier launch has computed over the first tokens of sequences. Decode attention, whose lengths and tables
// begin behind these tokens, adds it to what it computes itself.
struct PrefixResults {
  const PrefixRows* rows = nullptr;  // [num_sequences]; nullptr: no sequence shares anything
  const float* outputs = nullptr;    // as RaggedPartials
  const float2* max_and_sum = nullptr;
  int place_rows = 0;  // of a place

  COURSE_HOST_DEVICE std::int64_t first_row(const PrefixRows& of, int part, int kv_head, int num_kv_heads) const {
    return (std::int64_t{of.first_place} * num_kv_heads + kv_head * of.num_parts + part) * place_rows + of.row;
  }
};

// Decode attention has two parts. plan_decode, called once for each step, cuts the work of one layer into equal
// shares; decode_attention, called for each layer, does the work. Both take the same batch, shape and options, and the
// same workspace.
std::size_t decode_workspace_bytes(const PageShape& shape, const BatchArrays& batch, const DecodeOptions& options = {});
void plan_decode(const PageShape& shape, const BatchArrays& batch, void* workspace, cudaStream_t stream,
                 const DecodeOptions& options = {});

// queries, output: [num_sequences, num_heads * head_dim], of row_type(pages' type); one token for each sequence, which
// sees all context_length positions, or the last batch.window (then there are no prefixes). Query head h reads kv head
// h / (num_heads / num_kv_heads). Scores are scaled by 1 / sqrt(head_dim). K and V of the last position are in the
// pages, or are new rows.
void decode_attention(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
                      cudaStream_t stream, const DecodeOptions& options = {}, const NewRows& new_rows = {},
                      const PrefixResults& prefixes = {});

// The kernels behind ragged_attention.
enum class RaggedKernel {
  kChosen,      // whichever suits the step (ragged_plan.cu)
  kShort,       // ragged_kernel.cuh, mma: few rows a warp
  kWide,        // ragged_kernel.cuh, mma: many rows a warp
  kWarpgroups,  // prefill_kernel.cuh, wgmma
};

// How ragged attention computes. The defaults are used unless a test or a measurement sets something else.
struct RaggedOptions {
  RaggedKernel kernel = RaggedKernel::kChosen;  // must serve the pages
  int part_tokens = 0;                          // the most context that a part may have; 0: as the plan decides
  // The kernel may start while the previous launch in the stream still runs, and waits for it only before it ends
  // itself. So neither may write what the other reads or writes, and all earlier work must have finished when the
  // previous launch allows this one to start. Of the kernels, only kWarpgroups overlaps; plans are the same.
  bool beside_previous = false;
};

// Causal attention of a ragged batch: prompts, chunks of prompts and single tokens side by side. Sequence s has the
// query rows query_starts[s] … query_starts[s + 1] - 1 (query_starts: [num_sequences + 1]): the last tokens of its
// context. queries, output: [query_starts' last entry, num_heads * head_dim]; num_tokens: at least the number of rows
// from query_starts[0] on. No sequence has more rows than context. plan_ragged fills the workspace once for each step;
// all three functions take the same shape, batch, num_tokens and options. Work is shared out by query rows, and where
// these are too few for all multiprocessors, along the context too. A sequence with one token may be among them;
// decode_attention is made for such sequences.
std::size_t ragged_workspace_bytes(const PageShape& shape, const BatchArrays& batch, int num_tokens);
std::size_t ragged_workspace_bytes(const PageShape& shape, const BatchArrays& batch, int num_tokens,
                                   const RaggedOptions& options);
void plan_ragged(const PageShape& shape, const BatchArrays& batch, const int* query_starts, int num_tokens,
                 void* workspace, cudaStream_t stream);
void plan_ragged(const PageShape& shape, const BatchArrays& batch, const int* query_starts, int num_tokens,
                 void* workspace, cudaStream_t stream, const RaggedOptions& options);
void ragged_attention(const Pages& pages, const BatchArrays& batch, const int* query_starts, const void* queries,
                      void* output, int num_tokens, const void* workspace, cudaStream_t stream,
                      const RaggedOptions& options = {});

}  // namespace common
