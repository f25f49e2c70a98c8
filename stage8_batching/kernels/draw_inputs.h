// How a step of a GpuRunner draws its tokens: inputs that are copied like the others, if there is anything to draw.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "../batch.h"
#include "common/base/check.h"
#include "common/cuda/model/cuda_sampler.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"

namespace stage8 {

class DrawInputs {
 public:
  explicit DrawInputs(int max_rows)
      : host_rows_(static_cast<std::size_t>(max_rows)), rows_(static_cast<std::size_t>(max_rows)) {}

  // The last upload, and the step that read it, must be over.
  void upload(const RaggedBatch& step, const common::Stream& stream) {
    draws_ = {.rows = rows_.data(), .num_rows = static_cast<int>(step.draws.size())};
    if (step.draws.empty()) {
      return;
    }
    COMMON_CHECK(step.draws.size() == step.logits_rows.size(), "each row of logits has a token drawn");
    std::vector<int> used;
    for (std::size_t i = 0; i < step.draws.size(); ++i) {
      const Draw& draw = step.draws[i];
      const int position = step.positions[static_cast<std::size_t>(step.logits_rows[i])] + 1;
      common::DrawParameters& row = host_rows_.data()[i];
      row = common::draw_parameters(draw.options, draw.sample_index, position);
      row.first_used = static_cast<int>(used.size());
      row.num_used = static_cast<int>(draw.used.size());
      used.insert(used.end(), draw.used.begin(), draw.used.end());
      draws_.have_cuts = draws_.have_cuts || (row.temperature > 0.0F && (row.top_k > 0 || row.top_p < 1.0F));
      draws_.have_penalties = draws_.have_penalties || row.repetition_penalty != 1.0F;
    }
    copy(host_rows_.data(), rows_.data(), step.draws.size(), stream);
    if (!used.empty()) {
      if (host_used_ == nullptr || host_used_->size() < used.size()) {
        // The host's array grows last: its size is the capacity of both.
        common::DeviceArray<int> larger(2 * used.size());
        host_used_ = std::make_unique<common::PinnedArray<int>>(2 * used.size());
        used_ = std::move(larger);
      }
      std::copy(used.begin(), used.end(), host_used_->data());
      copy(host_used_->data(), used_.data(), used.size(), stream);
    }
    draws_.used = used_.data();
  }

  const common::Draws& draws() const { return draws_; }

 private:
  template <typename T>
  static void copy(const T* host, T* device, std::size_t count, const common::Stream& stream) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, count * sizeof(T), cudaMemcpyHostToDevice, stream.get()));
  }

  common::PinnedArray<common::DrawParameters> host_rows_;
  common::DeviceArray<common::DrawParameters> rows_;
  std::unique_ptr<common::PinnedArray<int>> host_used_;
  common::DeviceArray<int> used_;
  common::Draws draws_;
};

}  // namespace
