// Attention of ProductionKernels: how it splits a step into the two kinds of attention.
#include <cmath>
#include <cstdint>

#include "common/cuda/runtime/device.h"
#include "common/paged/attention_launches.h"
#include "common/paged/checks.h"
#include "common/paged/production_kernels.h"
#include "common/paged/ragged_plan.h"
#include "common/paged/supported_shapes.h"

namespace common {
namespace {

// `count` sequences of the batch, from number `first` on.
BatchArrays part_of(const BatchArrays& batch, int first, int count) {
  BatchArrays part = batch;
  part.num_sequences = count;
  part.context_lengths += first;
  part.table_starts += first;
  return part;
}

std::size_t whole_lines(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// How many multiprocessors it takes to read at the memory's full speed (KERNELS.md, "Decodes beside a chunk").
int readers_of_memory() {
  constexpr double kBytesPerSecond = 64e9;
  return static_cast<int>(std::ceil(common::device_limits().memory_bandwidth / kBytesPerSecond));
}

// A step, split: decode attention computes the sequences with one token, ragged attention the others. Decode attention
// uses the beginning of the workspace and ragged attention the end, so that neither has to know how much room the other
// needs.
//
// The two use different parts of the chip: decode attention waits for memory, ragged attention for the tensor cores. So
// they run side by side, decode attention on as many multiprocessors as the memory can feed and ragged attention on all
// others; a multiprocessor whose decodes are done gets what is left of ragged attention.
struct SplitStep {
  BatchArrays decodes;
  BatchArrays chunks;
  int num_chunk_tokens;
  const int* query_starts;  // the chunks' query_starts

  explicit SplitStep(const StepArrays& step)
      : decodes(part_of(step.batch, 0, step.num_decodes)),
        chunks(part_of(step.batch, step.num_decodes, step.batch.num_sequences - step.num_decodes)),
        num_chunk_tokens(chunks.num_sequences == 0 ? 0 : step.num_tokens - step.num_decodes),
        query_starts(step.query_starts == nullptr ? nullptr : step.query_starts + step.num_decodes) {}

  // Side by side only if every multiprocessor then has two tasks of ragged attention or more: with fewer, some
  // multiprocessors begin when decode attention has ended, and all wait for these.
  bool is_side_by_side(const PageShape& shape) const {
    const std::int64_t rows = std::int64_t{num_chunk_tokens} * chunks.num_heads;
    const int num_multiprocessors = common::device_limits().num_multiprocessors;
    return decodes.num_sequences > 0 && shape.type == ScalarType::kBFloat16 && has_warpgroups(shape) &&
           rows >= std::int64_t{2} * num_multiprocessors * kWarpgroupsTaskRows &&
           readers_of_memory() < num_multiprocessors;
  }
  DecodeOptions decode_options(const PageShape& shape) const {
    // It may overlap the previous launch, which computes the rows or stores the chunks' rows: what decode attention
    // reads at once was written before that launch began.
    return {.num_multiprocessors = is_side_by_side(shape) ? readers_of_memory() : 0, .overlap_previous = true};
  }

  void* chunks_workspace(const PageShape& shape, std::span<std::byte> workspace) const {
    return workspace.last(whole_lines(ragged_workspace(nullptr, shape, chunks, num_chunk_tokens).bytes)).data();
  }
};

}  // namespace

const ProductionKernels kProductionKernels{};

std::string ProductionKernels::unsupported(const PageShape& shape, int num_heads) const {
  return kProductionShapes.unsupported(shape, num_heads);
}

std::size_t ProductionKernels::workspace_bytes(const PageShape& shape, const StepArrays& largest) const {
  check_step(*this, shape, largest);
  return whole_lines(decode_workspace_bytes(shape, largest.batch)) +
         whole_lines(ragged_workspace_bytes(shape, largest.batch, largest.num_tokens));
}

void ProductionKernels::plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> workspace,
                             cudaStream_t stream) const {
  check_step(*this, shape, step);
  const SplitStep split(step);
  COMMON_CHECK(ProductionKernels::workspace_bytes(shape, step) <= workspace.size(),
               "the workspace has room for the step");
  if (split.decodes.num_sequences > 0) {
    plan_decode(shape, split.decodes, workspace.data(), stream, split.decode_options(shape));
  }
  if (split.num_chunk_tokens > 0) {
    plan_ragged(shape, split.chunks, split.query_starts, split.num_chunk_tokens,
                split.chunks_workspace(shape, workspace), stream);
  }
}

void ProductionKernels::attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
                               std::span<std::byte> workspace, cudaStream_t stream) const {
  check_pages(*this, pages);
  check_step(*this, pages.shape, step);
  if (step.batch.num_sequences == 0 || step.num_tokens == 0) {
    return;
  }
  COMMON_CHECK(rows.queries != nullptr && output != nullptr, "queries and output are given");
  COMMON_CHECK(is_aligned(rows.queries) && is_aligned(output), "queries and output begin at multiples of 16 bytes");
  attend_behind({}, pages, step, rows, output, workspace, stream);
}

void ProductionKernels::attend_behind(const PrefixResults& prefixes, const Pages& pages, const StepArrays& step,
                                      const LayerRows& rows, void* output, std::span<std::byte> workspace,
                                      cudaStream_t stream) const {
  const PageShape& shape = pages.shape;
  const SplitStep split(step);
  if (split.num_chunk_tokens > 0 && rows.keys != nullptr) {
    const std::int64_t skipped = step.num_decodes * rows.row_stride * bytes_of(row_type(shape.type));
    write_to_slots(pages, static_cast<const std::byte*>(rows.keys) + skipped,
                   static_cast<const std::byte*>(rows.values) + skipped, rows.row_stride,
                   step.slot_mapping + step.num_decodes, split.num_chunk_tokens, stream);
  }
  if (split.decodes.num_sequences > 0) {
    decode_attention(pages, split.decodes, rows.queries, output, workspace.data(), stream, split.decode_options(shape),
                     {rows.keys, rows.values, rows.row_stride, step.slot_mapping}, prefixes);
  }
  if (split.num_chunk_tokens > 0) {
    ragged_attention(pages, split.chunks, split.query_starts, rows.queries, output, split.num_chunk_tokens,
                     split.chunks_workspace(shape, workspace), stream,
                     {.beside_previous = split.is_side_by_side(shape)});
  }
}

}  // namespace common
