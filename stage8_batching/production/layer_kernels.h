// A table of kernels that passes all calls on to another table, and knows what a runner's calls do not say: how far
// back a layer's queries see (WINDOWS.md), and where K and V are. A runner's pages are its own, and what is in this
// folder copies them too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/model/llama.h"
#include "common/paged/paged_kernels.h"

namespace stage8 {

class LayerKernels final : public common::PagedKernels {
 public:
  // The other table must outlive this one. If it has no windows, no context may be longer than the model's window.
  LayerKernels(const common::PagedKernels& kernels, const common::LlamaConfig& config);

  // The first layer's; the others follow. Known once a step has been launched.
  const common::Pages& pages() const;

  // False: the next steps have no windows. That is right if no context is longer than the model's, which then hides
  // nothing; and a step that reads shared prefixes together can have none.
  void hide(bool enabled) { hides_ = enabled; }
  // How long a context may be in a step without windows.
  int max_seen() const { return window_ > 0 ? window_ : std::numeric_limits<int>::max(); }

  std::string unsupported(const common::PageShape& shape, int num_heads) const override {
    return kernels_.unsupported(shape, num_heads);
  }
  bool has_windows() const override { return kernels_.has_windows(); }
  void write_to_slots(const common::Pages& pages, const void* keys, const void* values, std::int64_t row_stride,
                      const int* slot_mapping, int num_tokens, cudaStream_t stream) const override {
    kernels_.write_to_slots(pages, keys, values, row_stride, slot_mapping, num_tokens, stream);
  }
  void read_from_slots(const common::Pages& pages, void* keys, void* values, std::int64_t row_stride,
                       const int* slot_mapping, int num_tokens, cudaStream_t stream) const override {
    kernels_.read_from_slots(pages, keys, values, row_stride, slot_mapping, num_tokens, stream);
  }
  void copy_blocks(void* keys, void* values, int num_layers, const common::PageShape& shape,
                   const common::PageCopy* copies, int num_copies, cudaStream_t stream) const override {
    kernels_.copy_blocks(keys, values, num_layers, shape, copies, num_copies, stream);
  }
  std::size_t workspace_bytes(const common::PageShape& shape, const common::StepArrays& largest) const override;
  // A plan for each kind of layer.
  void plan(const common::PageShape& shape, const common::StepArrays& step, std::span<std::byte> workspace,
            cudaStream_t stream) const override;
  void attend(const common::Pages& pages, const common::StepArrays& step, const common::LayerRows& rows, void* output,
              std::span<std::byte> workspace, cudaStream_t stream) const override;

 private:
  int layer_of(const common::Pages& pages) const;
  common::StepArrays with_window(common::StepArrays step) const;
  // Layers with a window and others have one half each, if there are both.
  std::span<std::byte> part_of(std::span<std::byte> workspace, bool has_window) const;

  const common::PagedKernels& kernels_;
  int window_;                    // 0: no layer has one that hides anything
  std::vector<bool> has_window_;  // by layer
  bool has_both_;
  bool hides_ = true;
  mutable common::Pages first_layer_;
};

}  // namespace
