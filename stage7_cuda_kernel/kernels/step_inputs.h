// What a step of a CudaRunner reads: flat arrays, brought over by one copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "../gpu_runner.h"
#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"

namespace stage7 {

// Where an array lies depends on the number of tokens alone, so that a recorded step finds it again.
class StepInputs {
 public:
  StepInputs(int max_tokens, int max_blocks)
      : max_tokens_(max_tokens),
        max_blocks_(max_blocks),
        host_(kBlockTables * stride(max_tokens) + static_cast<std::size_t>(max_blocks)),
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
    stride_ = stride(num_tokens);
    host(kContextLengths)[0] = step.context_length;
    host(kQueryStarts)[0] = 0;
    host(kQueryStarts)[1] = num_tokens;
    host(kTableStarts)[0] = 0;
    host(kLogitsRows)[0] = num_tokens - 1;
    std::copy(step.tokens.begin(), step.tokens.end(), host(kTokens));
    std::copy(step.positions.begin(), step.positions.end(), host(kPositions));
    std::copy(step.slot_mapping.begin(), step.slot_mapping.end(), host(kSlots));
    std::copy_n(step.block_table.begin(), num_blocks, host(kBlockTables));
    const std::size_t used = kBlockTables * stride_ + static_cast<std::size_t>(num_blocks);
    CUDA_CHECK(cudaMemcpyAsync(device_.data(), host_.data(), used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
    uploaded_.record(stream);
  }

  // Of the last upload.
  int num_tokens() const { return num_tokens_; }
  int max_blocks() const { return max_blocks_; }
  // On the device.
  const int* context_lengths() const { return device(kContextLengths); }
  const int* query_starts() const { return device(kQueryStarts); }  // [2]: 0, num_tokens
  const int* logits_rows() const { return device(kLogitsRows); }    // [1]: the last one
  const int* tokens() const { return device(kTokens); }
  const int* positions() const { return device(kPositions); }
  const int* slot_mapping() const { return device(kSlots); }
  const int* table_starts() const { return device(kTableStarts); }  // [1]: 0
  const int* block_tables() const { return device(kBlockTables); }  // [num_blocks]: the one table

 private:
  enum Array : std::size_t {
    kContextLengths,
    kQueryStarts,
    kLogitsRows,
    kTokens,
    kPositions,
    kSlots,
    kTableStarts,
    kBlockTables
  };
  // Of whole 16 bytes, and one more than there are tokens.
  static std::size_t stride(int num_tokens) { return static_cast<std::size_t>(num_tokens) / 4 * 4 + 4; }
  int* host(Array array) const { return host_.data() + array * stride_; }
  const int* device(Array array) const { return device_.data() + array * stride_; }

  int max_tokens_;
  int max_blocks_;
  int num_tokens_ = 0;
  std::size_t stride_ = 0;
  // The arrays, [stride] each, and then the block table.
  common::PinnedArray<int> host_;
  common::DeviceArray<int> device_;
  common::Event uploaded_;
};

}  // namespace
