// Attention of ProductionKernels: which shapes it serves, and how it splits a step into the two kinds of attention.
#include <cstdint>

#include "../kernels/checks.h"
#include "attention_launches.h"
#include "common/cuda/runtime/device.h"
#include "decode_ring.h"
#include "head_dims.h"
#include "production_kernels.h"
#include "ragged_plan.h"

namespace stage7 {
namespace {

// `count` sequences of the batch, from number `first` on.
Batch part_of(const Batch& batch, int first, int count) {
  Batch part = batch;
  part.num_sequences = count;
  part.context_lengths += first;
  part.table_starts += first;
  return part;
}

std::size_t whole_lines(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// A step, split: decode attention computes the sequences with one token, ragged attention the others. Decode attention
// uses the beginning of the workspace and ragged attention the end, so that neither has to know how much room the other
// needs.
struct SplitStep {
  Batch decodes;
  Batch chunks;
  int num_chunk_tokens;
  const int* query_starts;  // the chunks' query_starts

  explicit SplitStep(const Step& step)
      : decodes(part_of(step.batch, 0, step.num_decodes)),
        chunks(part_of(step.batch, step.num_decodes, step.batch.num_sequences - step.num_decodes)),
        num_chunk_tokens(chunks.num_sequences == 0 ? 0 : step.num_tokens - step.num_decodes),
        query_starts(step.query_starts == nullptr ? nullptr : step.query_starts + step.num_decodes) {}

  void* chunks_workspace(const PageShape& shape, std::span<std::byte> workspace) const {
    return workspace.last(whole_lines(ragged_workspace(nullptr, shape, chunks, num_chunk_tokens).bytes)).data();
  }
};

}  // namespace

const ProductionKernels kProductionKernels{};

std::string ProductionKernels::unsupported(const PageShape& shape, int num_heads) const {
  if (shape.type == ScalarType::kFloat32) {
    return "the production kernels are for bfloat16 and float8";
  }
  if (std::string reason = unsupported_by_all(shape, num_heads); !reason.empty()) {
    return reason;
  }
  const int head_dim = shape.head_dim;
  const int block_size = shape.block_size;
  const bool is_float8 = shape.type == ScalarType::kFloat8;
  const std::string kernels = is_float8 ? "the float8 kernels need " : "the bfloat16 kernels need ";
  // A tile's scales are 16 bytes, the smallest copy: a block cannot be half a tile.
  if ((block_size != 8 || is_float8) && block_size != 16 && block_size != 32 && block_size != 64) {
    return kernels + "blocks of " + (is_float8 ? "" : "8, ") + "16, 32 or 64 tokens, not " + std::to_string(block_size);
  }
  if (!is_head_dim(head_dim)) {
    return kernels + "a head dimension of " + list_head_dims() + ", not " + std::to_string(head_dim);
  }
  const int group = num_heads / shape.num_kv_heads;
  if (group > 16) {
    return kernels + "at most 16 query heads to a kv head, not " + std::to_string(group);
  }
  const std::size_t shared_bytes =
      decode_shared_bytes(decode_ring(shape.type, head_dim, group, true), shape.type, head_dim, group);
  if (common::has_cuda_device() && shared_bytes > common::device_limits().shared_bytes_per_block) {
    return kernels + std::to_string(shared_bytes) + " bytes of shared memory for " + std::to_string(group) +
           " query heads of " + std::to_string(head_dim) + " dimensions to a kv head, and a thread block on " +
           common::device_limits().name + " can have " + std::to_string(common::device_limits().shared_bytes_per_block);
  }
  return {};
}

std::size_t ProductionKernels::workspace_bytes(const PageShape& shape, const Step& largest) const {
  check_step(*this, shape, largest);
  return whole_lines(decode_workspace_bytes(shape, largest.batch)) +
         whole_lines(ragged_workspace_bytes(shape, largest.batch, largest.num_tokens));
}

void ProductionKernels::plan(const PageShape& shape, const Step& step, std::span<std::byte> workspace,
                             cudaStream_t stream) const {
  check_step(*this, shape, step);
  const SplitStep split(step);
  COMMON_CHECK(workspace_bytes(shape, step) <= workspace.size(), "the workspace has room for the step");
  if (split.decodes.num_sequences > 0) {
    plan_decode(shape, split.decodes, workspace.data(), stream);
  }
  if (split.num_chunk_tokens > 0) {
    plan_ragged(shape, split.chunks, split.query_starts, split.num_chunk_tokens,
                split.chunks_workspace(shape, workspace), stream);
  }
}

void ProductionKernels::attend(const Pages& pages, const Step& step, const LayerRows& rows, void* output,
                               std::span<std::byte> workspace, cudaStream_t stream) const {
  const PageShape& shape = pages.shape;
  const SplitStep split(step);
  if (split.decodes.num_sequences > 0) {
    // It may overlap the previous launch, which computes the rows: what decode attention reads at once was written
    // before that launch began.
    decode_attention(pages, split.decodes, rows.queries, output, workspace.data(), stream, {.overlap_previous = true},
                     {rows.keys, rows.values, rows.row_stride, step.slot_mapping});
  }
  if (split.num_chunk_tokens == 0) {
    return;
  }
  check_pages(*this, pages);
  check_batch(*this, shape, split.chunks);
  if (rows.keys != nullptr) {
    const std::int64_t skipped = step.num_decodes * rows.row_stride * bytes_of(row_type(shape.type));
    write_to_slots(pages, static_cast<const std::byte*>(rows.keys) + skipped,
                   static_cast<const std::byte*>(rows.values) + skipped, rows.row_stride,
                   step.slot_mapping + step.num_decodes, split.num_chunk_tokens, stream);
  }
  ragged_attention(pages, split.chunks, split.query_starts, rows.queries, output, split.num_chunk_tokens,
                   split.chunks_workspace(shape, workspace), stream);
}

}  // namespace
