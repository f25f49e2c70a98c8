// A table of kernels that passes all calls on to another table, and notes where K and V are: a runner's pages are its
// own, and what is in this folder copies them too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/base/check.h"
#include "common/paged/paged_kernels.h"

namespace stage8 {

class PageFinder final : public common::PagedKernels {
 public:
  // The other table must outlive this one.
  explicit PageFinder(const common::PagedKernels& kernels) : kernels_(kernels) {}

  // The first layer's; the others follow. Known once a step has been launched.
  const common::Pages& pages() const {
    COMMON_CHECK(first_layer_.keys != nullptr, "no step has been computed: no block has contents");
    return first_layer_;
  }

  std::string unsupported(const common::PageShape& shape, int num_heads) const override {
    return kernels_.unsupported(shape, num_heads);
  }
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
  std::size_t workspace_bytes(const common::PageShape& shape, const common::StepArrays& largest) const override {
    return kernels_.workspace_bytes(shape, largest);
  }
  void plan(const common::PageShape& shape, const common::StepArrays& step, std::span<std::byte> workspace,
            cudaStream_t stream) const override {
    kernels_.plan(shape, step, workspace, stream);
  }
  void attend(const common::Pages& pages, const common::StepArrays& step, const common::LayerRows& rows, void* output,
              std::span<std::byte> workspace, cudaStream_t stream) const override {
    if (first_layer_.keys == nullptr) {
      first_layer_ = pages;  // a step begins with the first layer
    }
    kernels_.attend(pages, step, rows, output, workspace, stream);
  }

 private:
  const common::PagedKernels& kernels_;
  mutable common::Pages first_layer_;
};

}  // namespace
