// Pages in the order that a step of the ladder reads, and a step's run.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "tests/gpu/gpu_fixtures.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include GPU_STAGE_HEADER(kernels/page_layout.h)
#include GPU_STAGE_HEADER(ladder/ladder.h)
// clang-format on

namespace tests {

// The keys or the values of pages in the plain order: [num_blocks, num_kv_heads, block_size, head_dim].
inline std::vector<std::byte> in_plain_order(const void* of_pages, const common::PageShape& shape) {
  const auto size = static_cast<std::size_t>(shape.elements() * common::bytes_of(shape.type));
  std::vector<std::byte> stored(size);
  CUDA_CHECK(cudaMemcpy(stored.data(), of_pages, size, cudaMemcpyDeviceToHost));
  std::vector<std::byte> plain(size);
  const int vecs_per_row = shape.head_dim * common::bytes_of(shape.type) / stage::kVecBytes;
  std::byte* to = plain.data();
  for (std::int64_t block = 0; block < shape.num_blocks; ++block) {
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      for (int row = 0; row < shape.block_size; ++row) {
        for (int vec = 0; vec < vecs_per_row; ++vec, to += stage::kVecBytes) {
          const std::int64_t place =
              stage::row_offset(shape, block, head, 0) * common::bytes_of(shape.type) +
              stage::vec_place(vecs_per_row, stage::rows_per_tile(shape), row, vec) * std::int64_t{stage::kVecBytes};
          std::memcpy(to, stored.data() + place, stage::kVecBytes);
        }
      }
    }
  }
  return plain;
}

// A batch's pages in the order that a step reads.
class PagesInOrder {
 public:
  explicit PagesInOrder(const GpuBatch& batch)
      : keys_(in_plain_order(batch.pages().keys, batch.pages().shape)),
        values_(in_plain_order(batch.pages().values, batch.pages().shape)),
        swizzled_(batch.pages()),
        plain_{keys_.data(), values_.data(), batch.pages().shape} {}

  const common::Pages& of(stage::RowOrder rows) const { return rows == stage::RowOrder::kPlain ? plain_ : swizzled_; }

 private:
  common::DeviceArray<std::byte> keys_;
  common::DeviceArray<std::byte> values_;
  common::Pages swizzled_;
  common::Pages plain_;
};

// The step's output for the batch.
inline std::vector<float> run_step(const stage::LadderStep& step, const GpuBatch& batch, const PagesInOrder& pages) {
  const common::PageShape& shape = batch.pages().shape;
  return batch.output_of(step.workspace_bytes(shape, batch.batch()), [&](void* workspace) {
    if (step.plan != nullptr) {
      step.plan(shape, batch.batch(), workspace, batch.stream.get());
      batch.stream.synchronize();
    }
    step.decode(pages.of(step.rows), batch.batch(), batch.queries.data(), batch.output.data(), workspace,
                batch.stream.get());
  });
}

}  // namespace tests
