// On a GPU, what layers with a window have of their own if other layers see all tokens (WINDOWS.md): tables and slots
// of a step, in which blocks are parts, on their way to the device; and parts on the host. Their pages are in the
// runner's memory (layer_kernels.h).
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../batch.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "layer_kernels.h"
#include "pinned_blocks.h"
#include "windows/local_pool.h"

namespace stage8 {

class LocalPages {
 public:
  // shape: of a layer's parts. max_tokens and max_table_blocks: of all sequences of a step together.
  LocalPages(std::shared_ptr<LocalPool> pool, const common::PageShape& shape, int num_layers, int max_tokens,
             std::size_t max_table_blocks);

  // As PinnedBlocks', for the parts of host blocks.
  void allocate(int count) { host_parts_.allocate(count); }
  int num_allocated() const { return host_parts_.num_allocated(); }
  std::string why_no_more() const { return host_parts_.why_no_more(); }

  // Enqueues the copies that the pool has planned: between device and host beside the last step, unless its windows
  // reach the part. If one throws, it and the later ones stay planned.
  void copy_planned(const LayerKernels& kernels, const common::Stream& stream);
  // Enqueues these, which can be carried out in any order. Host blocks have the numbers that they have in the pool.
  void copy(const LayerKernels& kernels, std::span<const BlockCopy> copies, const common::Stream& stream);

  // Looks the parts of a step's blocks up, and copies its tables and slots to the device, after the last step that used
  // these buffers has read its own. num_tokens: with those of inactive sequences. `which`, 0 or 1: whose buffers.
  void upload(std::size_t which, const RaggedBatch& batch, int num_tokens, const common::Stream& stream);
  // What has been enqueued in the stream so far reads them.
  void end(std::size_t which, const common::Stream& stream) { buffers_[which].read.record(stream); }
  const int* slot_mapping(std::size_t which) const { return buffers_[which].device.data(); }
  // Begins where the step's other tables begin.
  const int* block_tables(std::size_t which) const { return slot_mapping(which) + max_tokens_; }

 private:
  struct Buffers {
    explicit Buffers(std::size_t size) : host(size), device(size) {}

    common::PinnedArray<int> host;  // slots, [max_tokens], and then the tables, one after the other
    common::DeviceArray<int> device;
    common::Event read;
  };

  std::shared_ptr<LocalPool> pool_;  // shared with the scheduler
  std::size_t max_tokens_;
  PinnedBlocks host_parts_;
  std::vector<int> last_parts_;  // that the last step reads and writes; it may be computed still
  std::array<Buffers, 2> buffers_;
};

}  // namespace
