// How a step draws its tokens, for the device: inputs that are copied like the others, if there is anything to draw.
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

class SamplingInputs {
 public:
  explicit SamplingInputs(int max_rows)
      : host_rows_(static_cast<std::size_t>(max_rows)), rows_(static_cast<std::size_t>(max_rows)) {}

  // The last upload, and the step that read it, must be over.
  void upload(const RaggedBatch& step, const common::Stream& stream) {
    batch_ = {.rows = rows_.data(), .num_rows = static_cast<int>(step.sampling_rows.size())};
    if (step.sampling_rows.empty()) {
      return;
    }
    COMMON_CHECK(step.sampling_rows.size() == step.logits_rows.size(), "each row of logits has a token drawn");
    std::vector<int> used;
    for (std::size_t i = 0; i < step.sampling_rows.size(); ++i) {
      const SamplingRow& wanted = step.sampling_rows[i];
      const int position = step.positions[static_cast<std::size_t>(step.logits_rows[i])] + 1;
      common::SamplingParameters& row = host_rows_.data()[i];
      row = common::sampling_parameters(wanted.options, wanted.sample_index, position);
      row.first_used = static_cast<int>(used.size());
      row.num_used = static_cast<int>(wanted.used.size());
      used.insert(used.end(), wanted.used.begin(), wanted.used.end());
      batch_.have_cuts = batch_.have_cuts || (row.temperature > 0.0F && (row.top_k > 0 || row.top_p < 1.0F));
      batch_.have_penalties = batch_.have_penalties || row.repetition_penalty != 1.0F;
    }
    copy(host_rows_.data(), rows_.data(), step.sampling_rows.size(), stream);
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
    batch_.used = used_.data();
  }

  const common::SamplingBatch& batch() const { return batch_; }

 private:
  template <typename T>
  static void copy(const T* host, T* device, std::size_t count, const common::Stream& stream) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, count * sizeof(T), cudaMemcpyHostToDevice, stream.get()));
  }

  common::PinnedArray<common::SamplingParameters> host_rows_;
  common::DeviceArray<common::SamplingParameters> rows_;
  std::unique_ptr<common::PinnedArray<int>> host_used_;
  common::DeviceArray<int> used_;
  common::SamplingBatch batch_;
};

}  // namespace
