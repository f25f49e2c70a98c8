// The argument checks that the launching functions of all kernels share.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "common/base/check.h"
#include "common/paged/paged_kernels.h"

namespace common {

inline bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// Why no table of kernels can serve the shape; empty if it is not for these reasons.
inline std::string unsupported_by_all(const PageShape& shape, int num_heads) {
  if (shape.num_kv_heads <= 0 || num_heads <= 0 || num_heads % shape.num_kv_heads != 0) {
    return "the kernels need query heads that share kv heads evenly, not " + std::to_string(num_heads) + " over " +
           std::to_string(shape.num_kv_heads);
  }
  if (shape.block_size > 0 && shape.num_blocks > std::numeric_limits<int>::max() / shape.block_size) {
    return "the kernels number slots in 32 bits, and " + std::to_string(shape.num_blocks) + " blocks of " +
           std::to_string(shape.block_size) + " have more";
  }
  return {};
}

// kernels, here and below: what has to serve the shape, a PagedKernels or anything else with its `unsupported` and
// `has_windows`.
inline void check_shape(const auto& kernels, const PageShape& shape, int num_heads) {
  COMMON_CHECK(shape.num_blocks > 0, "pages have blocks");
  const std::string reason = kernels.unsupported(shape, num_heads);
  COMMON_CHECK(reason.empty(), reason);
}

inline void check_pages(const auto& kernels, const Pages& pages) {
  check_shape(kernels, pages.shape, pages.shape.num_kv_heads);
  COMMON_CHECK(pages.keys != nullptr && (pages.values != nullptr || pages.shape.is_paired()),
               "pages have keys and values");
  COMMON_CHECK(is_aligned(pages.keys) && is_aligned(pages.values), "pages begin at multiples of 16 bytes");
}

// Checks the rows of K and V of a batch's tokens, and the slots that they go to.
inline void check_rows(const PageShape& shape, const void* keys, const void* values, std::int64_t row_stride,
                       const int* slot_mapping) {
  const int vec = 16 / bytes_of(row_type(shape.type));
  COMMON_CHECK(keys != nullptr && values != nullptr && slot_mapping != nullptr, "rows and slots are given");
  COMMON_CHECK(is_aligned(keys) && is_aligned(values), "rows begin at multiples of 16 bytes");
  COMMON_CHECK(row_stride >= std::int64_t{shape.num_kv_heads} * shape.head_dim && row_stride % vec == 0,
               "rows hold all heads and begin at multiples of 16 bytes");
}

inline void check_copies(const PageCopy* copies, int num_copies, int num_layers) {
  COMMON_CHECK(num_layers > 0 && num_layers < 32768, "a cache has layers");
  COMMON_CHECK(num_copies >= 0 && (num_copies == 0 || copies != nullptr), "copies are given");
}

inline void check_batch(const auto& kernels, const PageShape& shape, const BatchArrays& batch) {
  COMMON_CHECK(batch.num_sequences >= 0, "a batch has no sequences or some");
  check_shape(kernels, shape, batch.num_heads);
  COMMON_CHECK(batch.num_sequences == 0 ||
                   (batch.context_lengths != nullptr && batch.block_tables != nullptr && batch.table_starts != nullptr),
               "a batch has lengths and tables");
  COMMON_CHECK(batch.max_blocks_per_sequence > 0, "block tables have entries");
  COMMON_CHECK(batch.window >= 0 && batch.window <= 1 << 30, "a window has tokens, at most 2^30");
  COMMON_CHECK(batch.window == 0 || kernels.has_windows(), "these kernels have no sliding windows");
}

inline void check_step(const auto& kernels, const PageShape& shape, const StepArrays& step) {
  check_batch(kernels, shape, step.batch);
  COMMON_CHECK(step.num_tokens >= 0, "a step has no tokens or some");
  COMMON_CHECK(
      step.num_decodes >= 0 && step.num_decodes <= step.batch.num_sequences && step.num_decodes <= step.num_tokens,
      "the decodes are sequences with a row each");
  COMMON_CHECK(step.num_tokens == 0 || step.query_starts != nullptr, "a step has query_starts");
}

}  // namespace common
