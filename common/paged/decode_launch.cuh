// The launch of decode attention: it derives the kernel's template arguments from the batch.
#pragma once

#include <cmath>

#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "common/paged/decode_kernel.cuh"
#include "common/paged/decode_ring.h"
#include "common/paged/decode_shape.h"
#include "common/paged/head_dims.h"

namespace common {

struct DecodeCall {
  const Pages& pages;
  const BatchArrays& batch;
  const void* queries;
  const NewRows& new_rows;
  const PrefixResults& prefixes;
  void* output;
  const DecodeWorkspace& workspace;
  const DecodeShape& shape;
  cudaStream_t stream;
  common::Overlap overlap;
};

template <ScalarType kType, int kHeadDim, int kQueryTiles, int kWarps, int kStages, int kResident, bool kContiguous,
          bool kGeneral>
void launch_kernel(const DecodeCall& call) {
  constexpr std::size_t kRingBytes = kWarps * TileRing<kType, kHeadDim, kStages, kWarps>::kBytes;
  const std::size_t shared_bytes =
      kRingBytes + PartialSoftmax<kHeadDim>::bytes(kWarps, exchanged_at_once(call.shape.group));
  common::launch(decode_kernel<kType, kHeadDim, kQueryTiles, kWarps, kStages, kResident, kContiguous, kGeneral>,
                 dim3(static_cast<unsigned>(call.shape.num_workers)), 32 * kWarps, shared_bytes, call.stream,
                 call.overlap, call.pages, call.batch, static_cast<const Element*>(call.queries), call.new_rows,
                 call.prefixes, static_cast<Element*>(call.output), call.workspace, score_scale(kHeadDim));
}

template <ScalarType kType, int kHeadDim, int kQueryTiles, int kWarps, int kStages, int kResident, bool kContiguous>
void launch_decode(const DecodeCall& call) {
  if (call.batch.window > 0 || call.prefixes.rows != nullptr || call.shape.heads_for_warps) {
    launch_kernel<kType, kHeadDim, kQueryTiles, kWarps, kStages, kResident, kContiguous, true>(call);
  } else {
    launch_kernel<kType, kHeadDim, kQueryTiles, kWarps, kStages, kResident, kContiguous, false>(call);
  }
}

template <ScalarType kType, int kHeadDim, int kQueryTiles, bool kContiguous>
void choose_ring(const DecodeCall& call) {
  // What decode_ring returns for this type and head_dim, as template arguments.
  constexpr DecodeRing kFew = decode_ring(kType, kHeadDim, kQueryTiles * 8, false);
  constexpr DecodeRing kMany = decode_ring(kType, kHeadDim, kQueryTiles * 8, true);
  if (call.shape.small_rings) {
    if constexpr (common::kServesSmallMemory) {
      constexpr DecodeRing kSmall = small_decode_ring(kType, kHeadDim, kQueryTiles * 8);
      launch_decode<kType, kHeadDim, kQueryTiles, kSmall.warps, kSmall.stages, kSmall.resident, kContiguous>(call);
    } else {
      throw common::CudaError(common::kNeedsMoreSharedMemory);
    }
  } else if (call.shape.many_heads) {
    launch_decode<kType, kHeadDim, kQueryTiles, kMany.warps, kMany.stages, kMany.resident, kContiguous>(call);
  } else {
    launch_decode<kType, kHeadDim, kQueryTiles, kFew.warps, kFew.stages, kFew.resident, kContiguous>(call);
  }
}

template <ScalarType kType, int kHeadDim, bool kContiguous = false>
void choose_query_tiles(const DecodeCall& call) {
  if (call.shape.group <= 8) {
    choose_ring<kType, kHeadDim, 1, kContiguous>(call);
  } else {
    choose_ring<kType, kHeadDim, 2, kContiguous>(call);
  }
}

template <ScalarType kType>
void choose_head_dim(const DecodeCall& call) {
  with_head_dim(call.pages.shape.head_dim, [&](auto head_dim) { choose_query_tiles<kType, head_dim>(call); });
}

// The same for float8, in a file of its own (decode_float8.cu): there are as many kernels as for bfloat16.
void decode_float8(const DecodeCall& call);

}  // namespace common
