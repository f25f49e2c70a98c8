#include "tests/bench/contiguous_attention.h"

#include "common/paged/decode_launch.cuh"
#include "common/paged/production_kernels.h"

namespace stage7 {

void contiguous_attention(const Pages& cache, const BatchArrays& batch, const void* queries, void* output,
                          void* workspace, cudaStream_t stream, const common::DecodeOptions& options) {
  PageShape paged = cache.shape;
  paged.block_size = common::kTileTokens;  // the kernels' own check knows no blocks of any other length
  check_pages(common::kProductionKernels, {cache.keys, cache.values, paged});
  check_batch(common::kProductionKernels, paged, batch);
  COMMON_CHECK(paged.type == ScalarType::kBFloat16 && paged.head_dim == 128, "bfloat16 and 128 dimensions");
  COMMON_CHECK(cache.shape.num_blocks == batch.num_sequences && cache.shape.block_size % common::kTileTokens == 0,
               "every sequence has a row of whole tiles");
  const common::DecodeShape shape = common::decode_shape(cache.shape, batch, options);
  const common::DecodeWorkspace parts =
      common::decode_workspace(workspace, shape.num_workers, shape.group, cache.shape.head_dim, batch.num_sequences);
  const common::NewRows none;
  const common::PrefixResults no_prefixes;
  common::choose_query_tiles<ScalarType::kBFloat16, 128, true>(
      {cache, batch, queries, none, no_prefixes, output, parts, shape, stream,
       options.overlap_previous ? common::Overlap::kPrevious : common::Overlap::kNone});
}

}  // namespace
