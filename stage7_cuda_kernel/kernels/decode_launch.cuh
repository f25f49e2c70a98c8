// The launch of decode attention: the kernel's template arguments that follow from the batch.
#pragma once

#include <cmath>

#include "decode_kernel.cuh"
#include "decode_shape.h"
#include "launch.h"

namespace stage7 {

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

template <typename Scalar, int kHeadDim, int kQueryTiles, int kWarps, int kStages, int kResident, bool kContiguous>
void launch_decode(const DecodeCall& call) {
  constexpr std::size_t kRingBytes = kWarps * TileRing<Scalar, kHeadDim, kStages, kWarps>::kBytes;
  const std::size_t shared_bytes = kRingBytes + Exchange<kHeadDim>::bytes(kWarps, call.shape.group);
  // Scores are kept in units of log2(e), so that the weights are powers of 2.
  const auto scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(kHeadDim)));
  launch(decode_kernel<Scalar, kHeadDim, kQueryTiles, kWarps, kStages, kResident, kContiguous>,
         dim3(static_cast<unsigned>(call.shape.num_workers)), 32 * kWarps, shared_bytes, call.stream, call.overlap,
         call.pages, call.batch, static_cast<const Scalar*>(call.queries), static_cast<Scalar*>(call.output),
         call.workspace, scale);
}

template <typename Scalar, int kHeadDim, int kQueryTiles, bool kContiguous>
void choose_ring(const DecodeCall& call) {
  // The rule's answers for this head_dim, as template arguments.
  constexpr DecodeRing kFew = decode_ring(kHeadDim, kQueryTiles * 8, false);
  constexpr DecodeRing kMany = decode_ring(kHeadDim, kQueryTiles * 8, true);
  if (call.shape.many_heads) {
    launch_decode<Scalar, kHeadDim, kQueryTiles, kMany.warps, kMany.stages, kMany.resident, kContiguous>(call);
  } else {
    launch_decode<Scalar, kHeadDim, kQueryTiles, kFew.warps, kFew.stages, kFew.resident, kContiguous>(call);
  }
}

template <typename Scalar, int kHeadDim, bool kContiguous = false>
void choose_query_tiles(const DecodeCall& call) {
  if (call.shape.group <= 8) {
    choose_ring<Scalar, kHeadDim, 1, kContiguous>(call);
  } else {
    choose_ring<Scalar, kHeadDim, 2, kContiguous>(call);
  }
}

}  // namespace
