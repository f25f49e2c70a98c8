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
    std::vector<common::SamplingBias> biases;
    for (std::size_t i = 0; i < step.sampling_rows.size(); ++i) {
      const SamplingRow& wanted = step.sampling_rows[i];
      const int position = step.positions[static_cast<std::size_t>(step.logits_rows[i])] + 1;
      common::SamplingParameters& row = host_rows_.data()[i];
      row = common::sampling_parameters(wanted.options, wanted.sample_index, position);
      // Only a repetition penalty asks for the prompt.
      const auto size = static_cast<int>(wanted.used.size());
      const int num_left_out = row.repetition_penalty != 1.0F ? 0 : std::min(wanted.prompt_length, size);
      row.first_used = static_cast<int>(used.size());
      row.num_used = size - num_left_out;
      row.prompt_length = wanted.prompt_length - num_left_out;
      used.insert(used.end(), wanted.used.begin() + num_left_out, wanted.used.end());
      const std::vector<common::SamplingBias> own_biases = common::sampling_biases(wanted.options, position);
      row.first_bias = static_cast<int>(biases.size());
      row.num_biases = static_cast<int>(own_biases.size());
      biases.insert(biases.end(), own_biases.begin(), own_biases.end());
      batch_.have_cuts = batch_.have_cuts || (row.temperature > 0.0F && (row.top_k > 0 || row.top_p < 1.0F));
      batch_.change_logits = batch_.change_logits || row.has_penalties() || row.num_biases > 0;
    }
    copy(host_rows_.data(), rows_.data(), step.sampling_rows.size(), stream);
    batch_.used = used_.upload(used, stream);
    batch_.biases = biases_.upload(biases, stream);
  }

  const common::SamplingBatch& batch() const { return batch_; }

 private:
  template <typename T>
  static void copy(const T* host, T* device, std::size_t count, const common::Stream& stream) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, count * sizeof(T), cudaMemcpyHostToDevice, stream.get()));
  }

  // As many numbers as a step has.
  template <typename T>
  class GrowingArray {
   public:
    const T* upload(const std::vector<T>& values, const common::Stream& stream) {
      if (values.empty()) {
        return device_.data();
      }
      if (host_ == nullptr || host_->size() < values.size()) {
        // The host's array grows last: its size is the capacity of both.
        common::DeviceArray<T> larger(2 * values.size());
        host_ = std::make_unique<common::PinnedArray<T>>(2 * values.size());
        device_ = std::move(larger);
      }
      std::copy(values.begin(), values.end(), host_->data());
      copy(host_->data(), device_.data(), values.size(), stream);
      return device_.data();
    }

   private:
    std::unique_ptr<common::PinnedArray<T>> host_;
    common::DeviceArray<T> device_;
  };

  common::PinnedArray<common::SamplingParameters> host_rows_;
  common::DeviceArray<common::SamplingParameters> rows_;
  GrowingArray<int> used_;
  GrowingArray<common::SamplingBias> biases_;
  common::SamplingBatch batch_;
};

}  // namespace
