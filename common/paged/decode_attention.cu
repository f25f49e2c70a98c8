// Decode attention: the checks, and the choice of the pages' type. The kernel is in decode_kernel.cuh.
#include "common/paged/attention_launches.h"
#include "common/paged/decode_launch.cuh"
#include "common/paged/supported_shapes.h"

namespace common {

void decode_attention(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
                      cudaStream_t stream, const DecodeOptions& options, const NewRows& new_rows,
                      const PrefixResults& prefixes) {
  check_pages(kProductionShapes, pages);
  check_batch(kProductionShapes, pages.shape, batch);
  if (batch.num_sequences == 0) {
    return;
  }
  COMMON_CHECK(queries != nullptr && output != nullptr, "queries and output are given");
  COMMON_CHECK(is_aligned(queries) && is_aligned(output), "queries and output begin at multiples of 16 bytes");
  if (new_rows.keys != nullptr) {
    check_rows(pages.shape, new_rows.keys, new_rows.values, new_rows.row_stride, new_rows.slot_mapping);
  }
  COMMON_CHECK(workspace != nullptr && is_aligned(workspace), "a workspace is given");
  COMMON_CHECK(prefixes.rows == nullptr || batch.window == 0, "prefixes are read together where all see them whole");
  const DecodeShape shape = decode_shape(pages.shape, batch, options);
  const DecodeWorkspace parts =
      decode_workspace(workspace, shape.num_workers, shape.group, pages.shape.head_dim, batch.num_sequences);
  const DecodeCall call{
      pages,  batch, queries, new_rows, prefixes,
      output, parts, shape,   stream,   options.overlap_previous ? common::Overlap::kPrevious : common::Overlap::kNone};
  if (pages.shape.type == ScalarType::kFloat8) {
    decode_float8(call);
  } else {
    choose_head_dim<ScalarType::kBFloat16>(call);
  }
}

}  // namespace common
