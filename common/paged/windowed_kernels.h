// Sliding windows for a table of kernels that has none, as a stage's plain ones: float32, and GPUs or pages for which
// there are no production kernels.
//
// Kernels without windows see a context from its first token on. But where a block is one token, a table that begins
// one entry later is that of a context without its first token: so a window can begin anywhere. Before a step, the rows
// of K that its windows reach are listed, and the layers are computed as if each row were a block. With blocks of 4 and
// W = 6, of a sequence with the table [7, 1, 3], ten tokens long, of which two are new:
//
//   positions   |  3 |  4  5  6  7 |  8  9
//   rows        | 31 |  4  5  6  7 | 12 13     block * 4 + slot
//   position 8  |[31    4  5  6  7   12]
//   position 9         [4  5  6  7   12 13]
//
// Within a block each kv head has rows of its own. So there is a list for each kv head, and a query counts as one
// sequence for each kv head. Nothing is moved: only shapes and tables change.
//
//   pages     [num_blocks, num_kv_heads, block_size, head_dim]
//    seen as  [num_blocks * num_kv_heads * block_size, 1, 1, head_dim]
//   queries   [num_tokens, num_heads, head_dim]
//    seen as  [num_tokens * num_kv_heads, num_heads / num_kv_heads, head_dim]
//
// A layer does the work that those kernels do for contexts of W tokens; its time was not measured. A list costs 4 bytes
// for each row of K and V, of 8 x head_dim bytes in float32, and is made once for all layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/paged/paged_kernels.h"

namespace common {

class WindowedKernels final : public PagedKernels {
 public:
  // The kernels must outlive this table, have their pages in the plain order (a row of head_dim elements for each
  // block, kv head and slot), serve blocks of one token, and need no workspace.
  explicit WindowedKernels(const PagedKernels& kernels) : kernels_(kernels) {}

  std::string unsupported(const PageShape& shape, int num_heads) const override {
    return kernels_.unsupported(shape, num_heads);
  }
  bool has_windows() const override { return true; }
  void write_to_slots(const Pages& pages, const void* keys, const void* values, std::int64_t row_stride,
                      const int* slot_mapping, int num_tokens, cudaStream_t stream) const override {
    kernels_.write_to_slots(pages, keys, values, row_stride, slot_mapping, num_tokens, stream);
  }
  void read_from_slots(const Pages& pages, void* keys, void* values, std::int64_t row_stride, const int* slot_mapping,
                       int num_tokens, cudaStream_t stream) const override {
    kernels_.read_from_slots(pages, keys, values, row_stride, slot_mapping, num_tokens, stream);
  }
  void copy_blocks(void* keys, void* values, int num_layers, const PageShape& shape, const PageCopy* copies,
                   int num_copies, cudaStream_t stream) const override {
    kernels_.copy_blocks(keys, values, num_layers, shape, copies, num_copies, stream);
  }
  std::size_t workspace_bytes(const PageShape& shape, const StepArrays& largest) const override;
  void plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> workspace,
            cudaStream_t stream) const override;
  void attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
              std::span<std::byte> workspace, cudaStream_t stream) const override;

 private:
  const PagedKernels& kernels_;
};

}  // namespace common
