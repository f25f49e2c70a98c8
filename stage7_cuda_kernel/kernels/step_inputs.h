// What a step of a CudaRunner reads: flat arrays, brought over by one copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "../gpu_runner.h"
#include "common/base/check.h"
#include "common/cuda/device.h"
#include "common/cuda/pinned.h"

namespace stage7 {

// Where an array lies depends on the number of tokens alone, so that a recorded step finds it again.
class StepInputs {
 public:
  StepInputs(int max_tokens, int max_blocks)
      : max_tokens_(max_tokens),
        max_blocks_(max_blocks),
        host_(kTokens + 3 * stride(max_tokens) + static_cast<std::size_t>(max_blocks)),
        device_(host_.size()) {}

  // Enqueued: what comes next in the stream finds the inputs. Waits until the last upload has left the host.
  void upload(const GpuStep& step, int block_size, const common::Stream& stream) {
    const auto num_tokens = static_cast<int>(step.tokens.size());
    const int num_blocks = (step.context_length + block_size - 1) / block_size;
    COMMON_CHECK(num_tokens > 0 && num_tokens <= max_tokens_, "a step has at most the tokens that were announced");
    COMMON_CHECK(step.positions.size() == step.tokens.size() && step.slot_mapping.size() == step.tokens.size(),
                 "each token has a position and a slot");
    COMMON_CHECK(num_blocks <= max_blocks_, "the sequence is longer than the model's context");
    COMMON_CHECK(num_tokens <= step.context_length && num_blocks <= static_cast<int>(step.block_table.size()),
                 "the block table covers the context");
    uploaded_.wait();
    num_tokens_ = num_tokens;
    host_.data()[kContextLength] = step.context_length;
    host_.data()[kQueryStarts] = 0;
    host_.data()[kQueryStarts + 1] = num_tokens;
    host_.data()[kLastRow] = num_tokens - 1;
    std::copy(step.tokens.begin(), step.tokens.end(), host_.data() + kTokens);
    std::copy(step.positions.begin(), step.positions.end(), host_.data() + array(1));
    std::copy(step.slot_mapping.begin(), step.slot_mapping.end(), host_.data() + array(2));
    std::copy_n(step.block_table.begin(), num_blocks, host_.data() + array(3));
    CUDA_CHECK(cudaMemcpyAsync(device_.data(), host_.data(),
                               (array(3) + static_cast<std::size_t>(num_blocks)) * sizeof(int), cudaMemcpyHostToDevice,
                               stream.get()));
    uploaded_.record(stream);
  }

  // Of the last upload.
  int num_tokens() const { return num_tokens_; }
  int max_blocks() const { return max_blocks_; }
  // On the device.
  const int* context_length() const { return device_.data() + kContextLength; }
  const int* query_starts() const { return device_.data() + kQueryStarts; }  // [2]: 0, num_tokens
  const int* last_row() const { return device_.data() + kLastRow; }
  const int* tokens() const { return device_.data() + kTokens; }  // [num_tokens], as the next two
  const int* positions() const { return device_.data() + array(1); }
  const int* slot_mapping() const { return device_.data() + array(2); }
  const int* block_table() const { return device_.data() + array(3); }

 private:
  static constexpr std::size_t kContextLength = 0;
  static constexpr std::size_t kQueryStarts = 1;
  static constexpr std::size_t kLastRow = 3;
  static constexpr std::size_t kTokens = 4;
  // Arrays begin at multiples of 16 bytes.
  static std::size_t stride(int num_tokens) { return (static_cast<std::size_t>(num_tokens) + 3) / 4 * 4; }
  // Where the i-th array begins, counted from the tokens on.
  std::size_t array(std::size_t i) const { return kTokens + i * stride(num_tokens_); }

  int max_tokens_;
  int max_blocks_;
  int num_tokens_ = 0;
  common::PinnedArray<int> host_;
  common::DeviceArray<int> device_;
  common::Event uploaded_;
};

}  // namespace
