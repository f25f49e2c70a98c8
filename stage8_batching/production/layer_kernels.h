// A table of kernels that passes all calls on to another table, and knows what a runner's calls do not say: how far
// back a layer's queries see (WINDOWS.md), and where K and V are. A runner's pages are its own, and what is in this
// folder copies them too.
//
// A runner has pages for as many blocks in all layers. Where layers with a window need fewer, the same memory is
// divided anew:
//
//   the runner's              | layer 0     | layer 1     | layer 2     | layer 3     |
//   1 and 3 have a window     | layer 0            | layer 2            | 1    | 3    |
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "../block_copy.h"
#include "common/model/llama.h"
#include "common/paged/paged_kernels.h"
#include "common/paged/windowed_kernels.h"

namespace stage8 {

class LayerKernels final : public common::PagedKernels {
 public:
  // The other table must outlive this one. If it has no windows, it is as WindowedKernels asks.
  LayerKernels(const common::PagedKernels& kernels, const common::LlamaConfig& config);
  LayerKernels(const LayerKernels&) = delete;
  LayerKernels& operator=(const LayerKernels&) = delete;

  // The first layer's; the others follow. Known once a step has been launched.
  const common::Pages& pages() const;

  // False: the next steps have no windows. That is right if no context is longer than the model's, which then hides
  // nothing; and a step that reads shared prefixes together can have none.
  void hide(bool enabled) { hides_ = enabled; }
  // Before the first step: from now on, a layer that sees all has num_blocks blocks, and one with a window num_parts.
  // The runner's memory must have room for them.
  void divide(std::int64_t num_blocks, std::int64_t num_parts);
  bool has_both() const { return has_both_; }  // layers with a window that hides something, and others
  bool is_divided() const { return num_parts_ > 0; }
  // If the pages are divided: where the layers with a window find a step's tables and slots, on the device. To be
  // called before it is launched.
  void use_parts(const int* block_tables, const int* slot_mapping);
  // As pages(), of the layers that see all, or of those with a window.
  common::Pages pages_of(bool has_window) const;
  // Copies blocks, or parts, in all layers that have them. As the other table's copy_blocks.
  void copy(bool has_window, std::span<const BlockCopy> copies, cudaStream_t stream) const;

  // How long a context may be in a step without windows.
  int max_seen() const { return window_ > 0 ? window_ : std::numeric_limits<int>::max(); }

  std::string unsupported(const common::PageShape& shape, int num_heads) const override {
    return kernels_.unsupported(shape, num_heads);
  }
  bool has_windows() const override { return true; }
  void write_to_slots(const common::Pages& pages, const void* keys, const void* values, std::int64_t row_stride,
                      const int* slot_mapping, int num_tokens, cudaStream_t stream) const override {
    kernels_.write_to_slots(own(pages), keys, values, row_stride, slot_mapping, num_tokens, stream);
  }
  void read_from_slots(const common::Pages& pages, void* keys, void* values, std::int64_t row_stride,
                       const int* slot_mapping, int num_tokens, cudaStream_t stream) const override {
    kernels_.read_from_slots(own(pages), keys, values, row_stride, slot_mapping, num_tokens, stream);
  }
  void copy_blocks(void* keys, void* values, int num_layers, const common::PageShape& shape,
                   const common::PageCopy* copies, int num_copies, cudaStream_t stream) const override;
  std::size_t workspace_bytes(const common::PageShape& shape, const common::StepArrays& largest) const override;
  // A plan for each kind of layer.
  void plan(const common::PageShape& shape, const common::StepArrays& step, std::span<std::byte> workspace,
            cudaStream_t stream) const override;
  void attend(const common::Pages& pages, const common::StepArrays& step, const common::LayerRows& rows, void* output,
              std::span<std::byte> workspace, cudaStream_t stream) const override;

 private:
  int layer_of(const common::Pages& pages) const;
  // Where the layer's pages are if they are divided.
  common::Pages own(const common::Pages& pages) const;
  common::StepArrays with_window(common::StepArrays step) const;
  // Layers with a window and others have one half each, if there are both.
  std::span<std::byte> part_of(std::span<std::byte> workspace, bool has_window) const;

  common::WindowedKernels windowed_;  // for kernels without windows
  const common::PagedKernels& kernels_;
  int window_;                    // 0: no layer has one that hides anything
  std::vector<bool> has_window_;  // by layer
  bool has_both_;
  bool hides_ = true;
  std::vector<int> rows_;  // by layer: how many layers of its kind come before it
  std::int64_t num_blocks_ = 0;
  std::int64_t num_parts_ = 0;  // 0: the pages are the runner's
  const int* block_tables_ = nullptr;
  const int* slot_mapping_ = nullptr;
  mutable common::Pages first_layer_;
};

}  // namespace
