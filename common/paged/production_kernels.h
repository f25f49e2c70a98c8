// The second table of kernels, faster than the plain ones and for float8 too.
//
// K and V are read for tensor cores, in tiles of certain sizes only: bfloat16 in blocks of 8, 16, 32 or 64 tokens,
// float8 in blocks of 16, 32 or 64; a head_dim of 32, 64, 96, 128 or 256; 1 to 16 query heads to a kv head. What
// paged_kernels.h says about all functions holds here too.
#pragma once

#include "common/paged/paged_kernels.h"

namespace common {

struct PrefixResults;

// cache_kernels.cu moves K and V, step_attention.cpp computes with the launches of attention_launches.h. A row is
// rounded to float8 once, when it is written; each value read back is a bfloat16 number, without further rounding.
class ProductionKernels : public PagedKernels {
 public:
  std::string unsupported(const PageShape& shape, int num_heads) const override;
  bool has_windows() const override { return true; }
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

 protected:
  // attend() without its checks. prefixes: of the decodes, whose lengths and tables begin behind them.
  void attend_behind(const PrefixResults& prefixes, const Pages& pages, const StepArrays& step, const LayerRows& rows,
                     void* output, std::span<std::byte> workspace, cudaStream_t stream) const;
};

extern const ProductionKernels kProductionKernels;

}  // namespace common
