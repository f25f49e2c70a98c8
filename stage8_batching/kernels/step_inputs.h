// What a step of a CudaRunner reads: flat arrays, brought over by one copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "../gpu_runner.h"
#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"

namespace stage8 {

// Sequences with a single token come first: they are decode attention's, and the others ragged attention's. Where an
// array lies depends on the number of tokens alone, so that a recorded step finds it again, however long the contexts
// are: block tables lie one after the other, at the end, and an array says where each one begins.
class StepInputs {
 public:
  StepInputs(int max_tokens, int max_sequences, int max_blocks)
      : max_tokens_(max_tokens),
        max_sequences_(max_sequences),
        max_blocks_(max_blocks),
        host_(kBlockTables * stride(max_tokens) +
              static_cast<std::size_t>(max_sequences) * static_cast<std::size_t>(max_blocks)),
        device_(host_.size()) {}

  // padded_sequences: as many as the step's, or more; those beyond are inactive and have one token each. The last
  // upload, and the step that read it, must be over.
  void upload(const RaggedBatch& step, int block_size, int padded_sequences, const common::Stream& stream) {
    const std::size_t used = lay_out(step, block_size, padded_sequences);
    const std::vector<int> rows = add_sequences(step);
    add_logits_rows(step, rows);
    add_padding(static_cast<int>(step.context_lengths.size()), padded_sequences);
    for (const auto& [index, row] : step.pending_tokens) {
      host(kPendingRows)[rows[static_cast<std::size_t>(index)]] = row;
    }
    CUDA_CHECK(cudaMemcpyAsync(device_.data(), host_.data(), used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
  }

  // Of the last upload.
  int num_tokens() const { return num_tokens_; }    // padding included
  int num_decodes() const { return num_decodes_; }  // sequences with one token, padding excluded
  int num_rows() const { return num_rows_; }        // whose logits are wanted, likewise
  int max_blocks() const { return max_blocks_; }    // of a sequence, in any step
  // On the device.
  const int* context_lengths() const { return device(kContextLengths); }
  const int* query_starts() const { return device(kQueryStarts); }  // of the sequences after the decodes, from 0 on
  const int* logits_rows() const { return device(kLogitsRows); }
  const int* tokens() const { return device(kTokens); }
  const int* positions() const { return device(kPositions); }
  const int* slot_mapping() const { return device(kSlots); }
  const int* table_starts() const { return device(kTableStarts); }  // [num_sequences], in block_tables
  const int* block_tables() const { return device(kBlockTables); }  // one after the other
  // [num_tokens]: which of the step before's rows has drawn the token; -1: the token is known.
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
  // Of whole 16 bytes, and one more than there are tokens.
  static std::size_t stride(int num_tokens) { return static_cast<std::size_t>(num_tokens) / 4 * 4 + 4; }
  int* host(Array array) const { return host_.data() + array * stride_; }
  const int* device(Array array) const { return device_.data() + array * stride_; }
  static int at(std::span<const int> values, int index) { return values[static_cast<std::size_t>(index)]; }

  // Checks the step, and says where each array begins. Returns the number of entries that will be in use.
  std::size_t lay_out(const RaggedBatch& step, int block_size, int padded_sequences) {
    const auto count = static_cast<int>(step.context_lengths.size());
    const int num_tokens = static_cast<int>(step.tokens.size()) + padded_sequences - count;
    COMMON_CHECK(count > 0 && count <= padded_sequences && padded_sequences <= max_sequences_,
                 "a step has at most the sequences that were announced");
    COMMON_CHECK(num_tokens <= max_tokens_, "a step has at most the tokens that were announced");
    COMMON_CHECK(step.positions.size() == step.tokens.size() && step.slot_mapping.size() == step.tokens.size(),
                 "each token has a position and a slot");
    COMMON_CHECK(step.logits_rows.size() <= step.context_lengths.size(), "a sequence has one row of logits at most");
    int num_entries = 0;
    for (int s = 0; s < count; ++s) {
      const int context_length = at(step.context_lengths, s);  // 0: inactive
      const int num_queries = at(step.query_starts, s + 1) - at(step.query_starts, s);
      const int num_blocks = at(step.table_starts, s + 1) - at(step.table_starts, s);
      COMMON_CHECK((context_length == 0 || num_queries <= context_length) &&
                       (context_length + block_size - 1) / block_size <= num_blocks,
                   "the block table covers the context");
      COMMON_CHECK(num_blocks <= max_blocks_, "the sequence is longer than the model's context");
      num_entries += num_blocks;
    }
    stride_ = stride(num_tokens);
    return kBlockTables * stride_ + static_cast<std::size_t>(num_entries);
  }

  // The step's sequences, those with one token first; all others keep their order. Sets num_decodes_.
  std::vector<int> decodes_first(const RaggedBatch& step) {
    std::vector<int> order(step.context_lengths.size());
    std::iota(order.begin(), order.end(), 0);
    const auto chunks = std::stable_partition(order.begin(), order.end(), [&](int s) {
      return at(step.query_starts, s + 1) - at(step.query_starts, s) == 1;
    });
    num_decodes_ = static_cast<int>(chunks - order.begin());
    return order;
  }

  // Writes lengths, tables and tokens. Returns the row that each of the step's tokens has got.
  std::vector<int> add_sequences(const RaggedBatch& step) {
    const std::vector<int> order = decodes_first(step);
    const auto count = static_cast<int>(order.size());
    std::vector<int> rows(step.tokens.size());
    num_tokens_ = 0;
    int* table = host(kBlockTables);
    for (int i = 0; i < count; ++i) {
      const int sequence = order[static_cast<std::size_t>(i)];
      host(kContextLengths)[i] = at(step.context_lengths, sequence);
      if (i >= num_decodes_) {
        host(kQueryStarts)[i - num_decodes_] = num_tokens_ - num_decodes_;
      }
      for (int token = at(step.query_starts, sequence); token < at(step.query_starts, sequence + 1); ++token) {
        rows[static_cast<std::size_t>(token)] = num_tokens_;
        add_token(at(step.tokens, token), at(step.positions, token), at(step.slot_mapping, token));
      }
      host(kTableStarts)[i] = static_cast<int>(table - host(kBlockTables));
      table = std::copy(step.block_tables.begin() + at(step.table_starts, sequence),
                        step.block_tables.begin() + at(step.table_starts, sequence + 1), table);
    }
    host(kQueryStarts)[count - num_decodes_] = num_tokens_ - num_decodes_;
    return rows;
  }

  // rows: of the step's tokens.
  void add_logits_rows(const RaggedBatch& step, const std::vector<int>& rows) {
    num_rows_ = 0;
    for (const int wanted : step.logits_rows) {
      host(kLogitsRows)[num_rows_++] = rows[static_cast<std::size_t>(wanted)];
    }
  }

  // Sequences first … end - 1 are inactive: they are there because a recorded step has as many as it was recorded with.
  void add_padding(int first, int end) {
    for (int i = first; i < end; ++i) {
      host(kContextLengths)[i] = 0;
      host(kTableStarts)[i] = 0;
      host(kLogitsRows)[i] = num_tokens_;
      add_token(0, 0, -1);
    }
  }

  void add_token(int token, int position, int slot) {
    host(kTokens)[num_tokens_] = token;
    host(kPendingRows)[num_tokens_] = -1;
    host(kPositions)[num_tokens_] = position;
    host(kSlots)[num_tokens_] = slot;
    num_tokens_ += 1;
  }

  int max_tokens_;
  int max_sequences_;
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
