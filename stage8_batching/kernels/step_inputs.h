// What a step of a CudaRunner reads.
#pragma once

#include <algorithm>
#include <span>

#include "common/check.h"
#include "common/cuda/device.h"
#include "common/cuda/pinned.h"
#include "common/tensor.h"

namespace stage8 {

// What a step reads and the host writes: one array, so that one copy brings it over. A recorded step finds it at the
// same place every time.
struct StepInputs {
  StepInputs(int num_tokens, int table_blocks)
      : max_tokens(num_tokens),
        max_blocks(table_blocks),
        size(static_cast<std::size_t>(kHeader + 3 * num_tokens + max_blocks)),
        host(size),
        device(size) {}

  void upload(std::span<const common::Token> step_tokens, std::span<const int> step_positions,
              std::span<const int> step_slots, std::span<const int> table, const common::Stream& stream) {
    const auto num_tokens = static_cast<int>(step_tokens.size());
    COMMON_CHECK(num_tokens > 0 && num_tokens <= max_tokens, "a step has at most the tokens that were announced");
    COMMON_CHECK(step_positions.size() == step_tokens.size() && step_slots.size() == step_tokens.size(),
                 "each token has a position and a slot");
    COMMON_CHECK(static_cast<int>(table.size()) <= max_blocks, "the sequence is longer than the model's context");
    copied.wait();  // the host's array may still be on its way
    int* const all = host.data();
    all[0] = step_positions.back() + 1;
    all[1] = 0;
    all[2] = num_tokens;
    all[3] = num_tokens - 1;
    std::copy(step_tokens.begin(), step_tokens.end(), all + kHeader);
    std::copy(step_positions.begin(), step_positions.end(), all + kHeader + max_tokens);
    std::copy(step_slots.begin(), step_slots.end(), all + kHeader + 2 * max_tokens);
    std::copy(table.begin(), table.end(), all + kHeader + 3 * max_tokens);
    const std::size_t used = static_cast<std::size_t>(kHeader + 3 * max_tokens) + table.size();
    CUDA_CHECK(cudaMemcpyAsync(device.data(), all, used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
    copied.record(stream);
  }

  const int* context_length() const { return device.data(); }
  const int* query_starts() const { return device.data() + 1; }
  const int* last_row() const { return device.data() + 3; }
  const int* tokens() const { return device.data() + kHeader; }
  const int* positions() const { return tokens() + max_tokens; }
  const int* slot_mapping() const { return positions() + max_tokens; }
  const int* block_table() const { return slot_mapping() + max_tokens; }

  static constexpr int kHeader = 4;
  int max_tokens;
  int max_blocks;
  std::size_t size;
  common::PinnedArray<int> host;
  common::DeviceArray<int> device;
  common::Event copied;
};

}  // namespace
