// The plans of steps whose decodes read shared prefixes together (common/paged/shared_plan.h), on their way to the GPU.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "../batch.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "common/paged/shared_plan.h"

namespace stage8 {

// One for both steps that can be in flight; `which`, 0 or 1, says whose buffers a step has.
class SharedPlans {
 public:
  SharedPlans(const common::PageShape& shape, int num_heads, int max_sequences);

  const common::PageShape& shape() const { return shape_; }
  const common::ReadingCosts& costs() const { return costs_; }
  void set_costs(const common::ReadingCosts& costs) { costs_ = costs; }

  // Copies the plan of a step that is computed with num_sequences sequences to the device, after the last step that
  // used these buffers has read its own. Returns what the plan reads together; if that is nothing, nothing is copied.
  std::vector<common::SharedPrefix> upload(std::size_t which, const RaggedBatch& batch,
                                           std::span<const common::SharedPrefix> groups, int num_sequences,
                                           const common::Stream& stream);
  // What has been enqueued in the stream so far reads the plan.
  void end(std::size_t which, const common::Stream& stream) { buffers_[which].read.record(stream); }
  const void* data(std::size_t which) const { return buffers_[which].device.data(); }

 private:
  struct Buffers {
    explicit Buffers(std::size_t bytes) : host(bytes), device(bytes) {}

    common::PinnedArray<std::byte> host;
    common::DeviceArray<std::byte> device;
    common::Event read;
  };

  common::SharedShape shape_for(int num_sequences) const;

  common::PageShape shape_;
  int num_heads_;
  common::ReadingCosts costs_;
  std::array<Buffers, 2> buffers_;
};

}  // namespace
