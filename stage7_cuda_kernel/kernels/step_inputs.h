// What a step of a GpuRunner reads: flat arrays, which one copy brings to the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "../batch.h"
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

  // Enqueues the copy: what is enqueued after it finds the inputs. Waits first until the last upload has left the host.
  void upload(const RaggedBatch& batch, int block_size, const common::Stream& stream) {
    COMMON_CHECK(batch.num_sequences() == 1, "a step is of one sequence");
    const int context_length = batch.context_lengths.front();
    const auto num_blocks = static_cast<int>(batch.block_tables.size());
    COMMON_CHECK(!batch.tokens.empty() && static_cast<int>(batch.tokens.size()) <= max_tokens_,
                 "a step has at most the tokens that were announced");
    COMMON_CHECK(batch.positions.size() == batch.tokens.size() && batch.slot_mapping.size() == batch.tokens.size(),
                 "each token has a position and a slot");
    COMMON_CHECK(batch.logits_rows.size() <= batch.num_sequences(), "a sequence has one row of logits at most");
    COMMON_CHECK(batch.num_tokens() <= context_length && (context_length + block_size - 1) / block_size <= num_blocks,
                 "the block table covers the context");
    COMMON_CHECK(num_blocks <= max_blocks_, "the sequence is longer than the model's context");
    uploaded_.wait();
    num_tokens_ = static_cast<int>(batch.tokens.size());
    num_rows_ = static_cast<int>(batch.logits_rows.size());
    stride_ = stride(num_tokens_);
    put(kContextLengths, batch.context_lengths);
    put(kQueryStarts, batch.query_starts);
    put(kLogitsRows, batch.logits_rows);
    put(kTokens, batch.tokens);
    put(kPositions, batch.positions);
    put(kSlots, batch.slot_mapping);
    put(kTableStarts, batch.table_starts);
    put(kBlockTables, batch.block_tables);
    const std::size_t used = kBlockTables * stride_ + batch.block_tables.size();
    CUDA_CHECK(cudaMemcpyAsync(device_.data(), host_.data(), used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
    uploaded_.record(stream);
  }

  // The counts of the last upload.
  int num_tokens() const { return num_tokens_; }
  int num_rows() const { return num_rows_; }  // rows whose logits are needed
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
  // A multiple of 16 bytes, with room for one number more than there are tokens.
  static std::size_t stride(int num_tokens) { return static_cast<std::size_t>(num_tokens) / 4 * 4 + 4; }
  void put(Array array, std::span<const int> values) {
    std::copy(values.begin(), values.end(), host_.data() + array * stride_);
  }
  const int* device(Array array) const { return device_.data() + array * stride_; }

  int max_tokens_;
  int max_blocks_;
  int num_tokens_ = 0;
  int num_rows_ = 0;
  std::size_t stride_ = 0;
  // The arrays, each [stride], and then the block table.
  common::PinnedArray<int> host_;
  common::DeviceArray<int> device_;
  common::Event uploaded_;
};

}  // namespace
