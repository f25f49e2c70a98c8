// Room in the host's memory for blocks that are swapped out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "kernels.h"

namespace stage8 {

class HostPages {
 public:
  HostPages(const PageShape& shape, int num_layers, int num_host_blocks)
      : num_layers_(static_cast<std::size_t>(num_layers)),
        num_blocks_(static_cast<std::size_t>(shape.num_blocks)),
        keys_(shape.keys_bytes() / num_blocks_, num_layers_, num_host_blocks),
        values_(shape.values_bytes() / num_blocks_, num_layers_, num_host_blocks) {}

  bool contains(int block) const { return static_cast<std::size_t>(block) >= num_blocks_; }

  // Copies a block, in all layers, between the device's pages (each [num_layers, num_blocks, …]) and this memory: one
  // of source and destination is a host block. Enqueues the copy and returns at once: this memory is pinned.
  void copy(void* keys, void* values, int source, int destination, const common::Stream& stream) {
    move(static_cast<std::byte*>(keys), keys_, source, destination, stream);
    move(static_cast<std::byte*>(values), values_, source, destination, stream);
  }

 private:
  struct Array {
    // At least one byte, so that there is an allocation to own.
    Array(std::size_t bytes, std::size_t num_layers, int num_host_blocks)
        : block_bytes(bytes), memory(bytes * num_layers * static_cast<std::size_t>(num_host_blocks) + 1) {}

    std::size_t block_bytes;  // in one layer; 0: all is in the other array
    common::PinnedArray<std::byte> memory;
  };

  // Where a block is in the first layer, and the distance in bytes from layer to layer.
  struct Layers {
    std::byte* first;
    std::size_t pitch;
  };

  // A block's layers lie one after the other in host memory, and a whole layer apart on the device.
  void move(std::byte* pages, Array& host, int source, int destination, const common::Stream& stream) const {
    COMMON_CHECK(contains(source) != contains(destination), "a swap is between device and host");
    if (host.block_bytes == 0) {
      return;
    }
    const bool is_out = contains(destination);
    const auto place = static_cast<std::size_t>(is_out ? destination : source) - num_blocks_;
    Layers from{pages + static_cast<std::size_t>(is_out ? source : destination) * host.block_bytes,
                num_blocks_ * host.block_bytes};
    Layers to{host.memory.data() + place * num_layers_ * host.block_bytes, host.block_bytes};
    if (!is_out) {
      std::swap(from, to);
    }
    const auto kind = is_out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    if (std::max(from.pitch, to.pitch) <= kMaxPitch) {
      CUDA_CHECK(cudaMemcpy2DAsync(to.first, to.pitch, from.first, from.pitch, host.block_bytes, num_layers_, kind,
                                   stream.get()));
      return;
    }
    for (std::size_t layer = 0; layer < num_layers_; ++layer) {
      CUDA_CHECK(cudaMemcpyAsync(to.first + layer * to.pitch, from.first + layer * from.pitch, host.block_bytes, kind,
                                 stream.get()));
    }
  }

  static constexpr std::size_t kMaxPitch = 0x7FFFFFFF;  // cudaDevAttrMaxPitch of every GPU so far

  std::size_t num_layers_;
  std::size_t num_blocks_;  // on the device; the numbers of host blocks begin with it
  Array keys_;
  Array values_;
};

}  // namespace
