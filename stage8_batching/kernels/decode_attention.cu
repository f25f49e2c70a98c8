// Decode attention: checks, and the choice of the kernel's template arguments. The kernel is in decode_kernel.cuh.
#include <cmath>

#include "attention_simple.h"
#include "decode_kernel.cuh"
#include "decode_shape.h"
#include "launch.h"

namespace stage8 {
namespace {

struct DecodeCall {
  const Pages& pages;
  const Batch& batch;
  const void* queries;
  void* output;
  const DecodeWorkspace& workspace;
  const DecodeShape& shape;
  cudaStream_t stream;
  bool overlap;
};

template <typename Scalar, int kHeadDim, int kQueryTiles, int kWarps, int kStages, int kResident>
void launch_decode(const DecodeCall& call) {
  constexpr std::size_t kRingBytes = kWarps * TileRing<Scalar, kHeadDim, kStages, kWarps>::kBytes;
  const std::size_t shared_bytes = kRingBytes + Exchange<kHeadDim>::bytes(kWarps, call.shape.group);
  // Scores are kept in units of log2(e), so that the weights are powers of 2.
  const auto scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(kHeadDim)));
  launch(decode_kernel<Scalar, kHeadDim, kQueryTiles, kWarps, kStages, kResident>,
         dim3(static_cast<unsigned>(call.shape.num_workers)), 32 * kWarps, shared_bytes, call.stream, call.overlap,
         call.pages, call.batch, static_cast<const Scalar*>(call.queries), static_cast<Scalar*>(call.output),
         call.workspace, scale);
}

template <typename Scalar, int kHeadDim, int kQueryTiles>
void choose_ring(const DecodeCall& call) {
  // The rule's answers for this head_dim, as template arguments.
  constexpr DecodeRing kFew = decode_ring(kHeadDim, kQueryTiles * 8, false);
  constexpr DecodeRing kMany = decode_ring(kHeadDim, kQueryTiles * 8, true);
  if (call.shape.many_heads) {
    launch_decode<Scalar, kHeadDim, kQueryTiles, kMany.warps, kMany.stages, kMany.resident>(call);
  } else {
    launch_decode<Scalar, kHeadDim, kQueryTiles, kFew.warps, kFew.stages, kFew.resident>(call);
  }
}

template <typename Scalar, int kHeadDim>
void choose_query_tiles(const DecodeCall& call) {
  if (call.shape.group <= 8) {
    choose_ring<Scalar, kHeadDim, 1>(call);
  } else {
    choose_ring<Scalar, kHeadDim, 2>(call);
  }
}

template <typename Scalar>
void choose_head_dim(const DecodeCall& call) {
  switch (call.pages.shape.head_dim) {
    case 32:
      return choose_query_tiles<Scalar, 32>(call);
    case 64:
      return choose_query_tiles<Scalar, 64>(call);
    case 96:
      return choose_query_tiles<Scalar, 96>(call);
    case 128:
      return choose_query_tiles<Scalar, 128>(call);
    default:
      return choose_query_tiles<Scalar, 256>(call);
  }
}

}  // namespace

void decode_attention(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
                      cudaStream_t stream, const DecodeOptions& options) {
  check_pages(pages);
  check_batch(pages.shape, batch);
  if (batch.num_sequences == 0) {
    return;
  }
  COMMON_CHECK(queries != nullptr && output != nullptr, "queries and output are given");
  COMMON_CHECK(is_aligned(queries) && is_aligned(output), "queries and output begin at multiples of 16 bytes");
  if (pages.shape.type == ScalarType::kFloat32) {
    return attention_simple(pages, batch, nullptr, queries, output, batch.num_sequences, stream);
  }
  COMMON_CHECK(workspace != nullptr && is_aligned(workspace), "a workspace is given");
  const DecodeShape shape = decode_shape(pages.shape, batch, options);
  const DecodeWorkspace parts =
      decode_workspace(workspace, shape.num_workers, shape.group, pages.shape.head_dim, batch.num_sequences);
  const DecodeCall call{pages, batch, queries, output, parts, shape, stream, options.overlap_previous};
  if (pages.shape.type == ScalarType::kFloat16) {
    choose_head_dim<__half>(call);
  } else {
    choose_head_dim<__nv_bfloat16>(call);
  }
}

}  // namespace
