// The lesson's table of kernels, behind the interface that a runner asks for (common/paged/paged_kernels.h). They are
// plain: they take any block size and any group, and run on every GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/paged/paged_kernels.h"

namespace stage8 {

using common::BatchArrays;
using common::LayerRows;
using common::PageCopy;
using common::PagedKernels;
using common::Pages;
using common::PageShape;
using common::ScalarType;
using common::StepArrays;

// Float32 and bfloat16, any block size, any group, every GPU; arithmetic is float32. cache_kernels.cu moves K and V,
// paged_attention.cu computes. There is nothing to plan, and no workspace.
class PlainKernels : public PagedKernels {
 public:
  std::string unsupported(const PageShape& shape, int num_heads) const override;
  void write_to_slots(const Pages& pages, const void* keys, const void* values, std::int64_t row_stride,
                      const int* slot_mapping, int num_tokens, cudaStream_t stream) const override;
  void read_from_slots(const Pages& pages, void* keys, void* values, std::int64_t row_stride, const int* slot_mapping,
                       int num_tokens, cudaStream_t stream) const override;
  void copy_blocks(void* keys, void* values, int num_layers, const PageShape& shape, const PageCopy* copies,
                   int num_copies, cudaStream_t stream) const override;
  std::size_t workspace_bytes(const PageShape& shape, const StepArrays& largest) const override;
  void plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> workspace,
            cudaStream_t stream) const override;
  void attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
              std::span<std::byte> workspace, cudaStream_t stream) const override;
};

extern const PlainKernels kPlainKernels;

}  // namespace
