// What a step of a GpuRunner reads: flat arrays, which one copy brings to the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>

#include "../batch.h"
#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"

namespace stage8 {

// Decode attention computes the sequences with a single token, which come first, and ragged attention the others. Where
// an array lies depends only on the number of tokens, so that a recorded step finds it again, however long the contexts
// are: block tables lie one after the other, at the end, and an array says where each table begins.
class StepInputs {
 public:
  StepInputs(int max_tokens, int max_sequences, int max_rows, int max_blocks)
      : max_tokens_(max_tokens),
        max_sequences_(max_sequences),
        max_rows_(max_rows),
        max_blocks_(max_blocks),
        host_(kBlockTables * stride(max_tokens) +
              static_cast<std::size_t>(max_sequences) * static_cast<std::size_t>(max_blocks)),
        device_(host_.size()) {}

  // padded_sequences: the batch's number of sequences, or more; the additional ones are inactive and have one token
  // each: a recorded step has a fixed number. The last upload, and the step that read it, must be over.
  void upload(const RaggedBatch& batch, int block_size, int padded_sequences, const common::Stream& stream) {
    const auto num_sequences = static_cast<int>(batch.num_sequences());
    const int padding = padded_sequences - num_sequences;
    check(batch, block_size, padded_sequences);
    num_tokens_ = static_cast<int>(batch.tokens.size()) + padding;
    num_rows_ = static_cast<int>(batch.logits_rows.size());
    num_decodes_ = 0;
    while (num_decodes_ < num_sequences && batch.num_queries(static_cast<std::size_t>(num_decodes_)) == 1) {
      num_decodes_ += 1;
    }
    stride_ = stride(num_tokens_);
    put(kContextLengths, batch.context_lengths, padding, 0);
    int* const padded_starts = put(kQueryStarts, batch.query_starts);
    std::iota(padded_starts, padded_starts + padding, batch.num_tokens() + 1);
    int* const padded_rows = put(kLogitsRows, batch.logits_rows);
    std::iota(padded_rows, padded_rows + padding, batch.num_tokens());
    put(kTokens, batch.tokens, padding, 0);
    put(kPositions, batch.positions, padding, 0);
    put(kSlots, batch.slot_mapping, padding, -1);
    put_pending_rows(batch);
    put(kTableStarts, std::span(batch.table_starts).first(batch.num_sequences()), padding, 0);
    put(kBlockTables, batch.block_tables);
    const std::size_t used = kBlockTables * stride_ + batch.block_tables.size();
    CUDA_CHECK(cudaMemcpyAsync(device_.data(), host_.data(), used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
  }

  // The counts of the last upload.
  int num_tokens() const { return num_tokens_; }    // padding included
  int num_decodes() const { return num_decodes_; }  // sequences with one token before the first longer one
  int num_rows() const { return num_rows_; }        // rows whose logits are needed, padding excluded
  int max_blocks() const { return max_blocks_; }    // the most that a sequence can have, in any step
  // On the device.
  const int* context_lengths() const { return device(kContextLengths); }
  const int* query_starts() const { return device(kQueryStarts); }  // [num_sequences + 1]
  const int* logits_rows() const { return device(kLogitsRows); }
  const int* tokens() const { return device(kTokens); }
  const int* positions() const { return device(kPositions); }
  const int* slot_mapping() const { return device(kSlots); }
  const int* table_starts() const { return device(kTableStarts); }  // [num_sequences], in block_tables
  const int* block_tables() const { return device(kBlockTables); }  // one after the other
  // [num_tokens]: the row of the previous step that draws the token; -1: the token is known.
  const int* pending_rows() const { return device(kPendingRows); }

 private:
  enum Array : std::size_t {
    kContextLengths,
    kQueryStarts,
    kLogitsRows,
    kTokens,
    kPositions,
    kSlots,
    kPendingRows,
    kTableStarts,
    kBlockTables
  };
  // A multiple of 16 bytes, with room for one number more than there are tokens.
  static std::size_t stride(int num_tokens) { return static_cast<std::size_t>(num_tokens) / 4 * 4 + 4; }
  int* host(Array array) const { return host_.data() + array * stride_; }
  const int* device(Array array) const { return device_.data() + array * stride_; }

  // Stores the values, and then padded_value `padding` times. Returns the end.
  int* put(Array array, std::span<const int> values, int padding = 0, int padded_value = 0) {
    return std::fill_n(std::copy(values.begin(), values.end(), host(array)), padding, padded_value);
  }

  void put_pending_rows(const RaggedBatch& batch) {
    std::fill_n(host(kPendingRows), num_tokens_, -1);
    for (const auto& [index, row] : batch.pending_tokens) {
      host(kPendingRows)[index] = row;
    }
  }

  void check(const RaggedBatch& batch, int block_size, int padded_sequences) const {
    const std::size_t count = batch.num_sequences();
    COMMON_CHECK(count > 0 && static_cast<int>(count) <= padded_sequences && padded_sequences <= max_sequences_,
                 "a step has at most the sequences that were announced");
    COMMON_CHECK(
        static_cast<int>(batch.tokens.size() + static_cast<std::size_t>(padded_sequences) - count) <= max_tokens_,
        "a step has at most the tokens that were announced");
    COMMON_CHECK(batch.positions.size() == batch.tokens.size() && batch.slot_mapping.size() == batch.tokens.size(),
                 "each token has a position and a slot");
    COMMON_CHECK(
        static_cast<int>(batch.logits_rows.size()) <= max_rows_ && batch.logits_rows.size() <= batch.tokens.size(),
        "a step has at most the rows of logits that were announced, and one for each token");
    for (std::size_t s = 0; s < count; ++s) {
      const int context_length = batch.context_lengths[s];  // 0: inactive
      const auto num_blocks = static_cast<int>(batch.block_table(s).size());
      COMMON_CHECK((context_length == 0 || batch.num_queries(s) <= context_length) &&
                       (context_length + block_size - 1) / block_size <= num_blocks,
                   "the block table covers the context");
      COMMON_CHECK(num_blocks <= max_blocks_, "the sequence is longer than the model's context");
    }
  }

  int max_tokens_;
  int max_sequences_;
  int max_rows_;
  int max_blocks_;
  int num_tokens_ = 0;
  int num_decodes_ = 0;
  int num_rows_ = 0;
  std::size_t stride_ = 0;
  // The arrays, [stride] each, and then the block tables.
  common::PinnedArray<int> host_;
  common::DeviceArray<int> device_;
};

}  // namespace
