// How many thread blocks share a step of decode attention, and with which rings.
#pragma once

#include "common/cuda/runtime/device.h"
#include "common/paged/attention_launches.h"
#include "common/paged/decode_ring.h"
#include "common/paged/paged_kernels.h"

namespace common {

struct DecodeShape {
  int group;        // query heads that share a kv head
  int num_workers;  // thread blocks
  int min_tiles;    // a share has at least min_tiles tiles, unless the whole work has fewer
  bool many_heads;
  bool heads_for_warps;  // there are nearly as many heads as warps, or more: each warp may have whole ones
  bool small_rings;
};

inline DecodeShape decode_shape(const PageShape& shape, const BatchArrays& batch, const DecodeOptions& options) {
  const int group = batch.num_heads / shape.num_kv_heads;
  const int num_multiprocessors = common::device_limits().num_multiprocessors;
  const auto fits = [&](const DecodeRing& ring) {
    return decode_shared_bytes(ring, shape.type, shape.head_dim, group) <= common::shared_bytes_per_block();
  };
  // The lengths are known on the device only, so the number of heads decides.
  // Chips before Hopper have no room for the large thread block.
  const bool takes_all = options.num_multiprocessors == 0;
  const bool many_heads = (takes_all && batch.num_sequences * shape.num_kv_heads > num_multiprocessors) ||
                          !fits(decode_ring(shape.type, shape.head_dim, group, false));
  DecodeRing ring = decode_ring(shape.type, shape.head_dim, group, many_heads);
  const bool small_rings = !fits(ring);
  if (small_rings) {
    ring = small_decode_ring(shape.type, shape.head_dim, group);
  }
  const int resident = ring.resident * (takes_all ? num_multiprocessors : options.num_multiprocessors);
  const int num_workers = options.num_workers > 0 ? options.num_workers : resident;
  return {.group = group,
          .num_workers = num_workers,
          .min_tiles = ring.warps,
          .many_heads = many_heads,
          .heads_for_warps = 9 * batch.num_sequences * shape.num_kv_heads >= 8 * num_workers * ring.warps,
          .small_rings = small_rings};
}

}  // namespace common
