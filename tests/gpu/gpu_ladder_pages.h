// Pages in the order that a step of the ladder reads, and a step's run.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "tests/gpu/gpu_fixtures.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include GPU_STAGE_HEADER(ladder/ladder.h)
#include GPU_STAGE_HEADER(ladder/swizzled_pages.h)
// clang-format on

namespace tests {

// The keys or the values of pages, copied into the order of swizzled_pages.h.
inline std::vector<std::byte> swizzled(const void* of_pages, const common::PageShape& shape) {
  const auto size = static_cast<std::size_t>(shape.elements() * common::bytes_of(shape.type));
  std::vector<std::byte> plain(size);
  CUDA_CHECK(cudaMemcpy(plain.data(), of_pages, size, cudaMemcpyDeviceToHost));
  std::vector<std::byte> result(size);
  const int vecs_per_row = shape.head_dim * common::bytes_of(shape.type) / stage::kVecBytes;
  const std::byte* from = plain.data();
  for (std::int64_t part = 0; part < shape.num_blocks * shape.num_kv_heads; ++part) {
    std::byte* const to = result.data() + part * shape.block_size * vecs_per_row * stage::kVecBytes;
    for (int row = 0; row < shape.block_size; ++row) {
      for (int vec = 0; vec < vecs_per_row; ++vec, from += stage::kVecBytes) {
        std::memcpy(to + stage::swizzled_place(shape.block_size, row, vec) * stage::kVecBytes, from, stage::kVecBytes);
      }
    }
  }
  return result;
}

// A batch's pages in the order that a step reads.
class PagesInOrder {
 public:
  explicit PagesInOrder(const GpuBatch& batch)
      : plain_(batch.pages_of(stage::kPlainKernels)),
        keys_(swizzled(plain_.keys, plain_.shape)),
        values_(swizzled(plain_.values, plain_.shape)),
        swizzled_{keys_.data(), values_.data(), plain_.shape} {}

  const common::Pages& of(stage::RowOrder rows) const { return rows == stage::RowOrder::kPlain ? plain_ : swizzled_; }

 private:
  common::Pages plain_;
  common::DeviceArray<std::byte> keys_;
  common::DeviceArray<std::byte> values_;
  common::Pages swizzled_;
};

// The step's output for the batch.
inline std::vector<float> run_step(const stage::LadderStep& step, const GpuBatch& batch, const PagesInOrder& pages) {
  const common::PageShape& shape = batch.shape();
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
