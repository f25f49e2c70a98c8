// What a step of a CudaRunner reads: the host writes it, one copy brings it over, and one launch gives every block
// table a row of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "../gpu_runner.h"
#include "common/check.h"
#include "common/cuda/device.h"
#include "common/cuda/pinned.h"
#include "spread_tables.h"

namespace stage7 {

// Sequences with a single token come first: they are decode attention's, and the others ragged attention's. Arrays
// stand at the same places in every step, so that a recorded step finds them.
class StepInputs {
 public:
  StepInputs(int most_tokens, int most_blocks)
      : max_tokens_(most_tokens),
        max_blocks_(most_blocks),
        tables_(static_cast<std::size_t>(most_tokens) * static_cast<std::size_t>(most_blocks)),
        host_(kArrays * stride() + tables_.size()),
        device_(host_.size()) {}

  // padded_sequences: as many as the step's, or more; those beyond are inactive and have one token each.
  void upload(const GpuStep& step, int padded_sequences, const common::Stream& stream) {
    const auto count = static_cast<int>(step.context_lengths.size());
    COMMON_CHECK(count > 0 && count <= padded_sequences, "a step has sequences");
    COMMON_CHECK(static_cast<int>(step.tokens.size()) + padded_sequences - count <= max_tokens_,
                 "a step has at most the tokens that were announced");
    COMMON_CHECK(step.positions.size() == step.tokens.size() && step.slot_mapping.size() == step.tokens.size(),
                 "each token has a position and a slot");
    copied_.wait();  // the host's arrays may still be on their way

    const auto num_queries = [&](int s) { return at(step.query_starts, s + 1) - at(step.query_starts, s); };
    std::vector<int> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    const auto chunks = std::stable_partition(order.begin(), order.end(), [&](int s) { return num_queries(s) == 1; });
    num_decodes_ = static_cast<int>(chunks - order.begin());
    std::vector<int> new_rows(step.tokens.size());
    num_tokens_ = 0;
    host(kTableStarts)[0] = 0;
    for (int i = 0; i < count; ++i) {
      const int sequence = order[static_cast<std::size_t>(i)];
      host(kContextLengths)[i] = at(step.context_lengths, sequence);
      if (i >= num_decodes_) {
        host(kQueryStarts)[i - num_decodes_] = num_tokens_ - num_decodes_;
      }
      for (int token = at(step.query_starts, sequence); token < at(step.query_starts, sequence + 1); ++token) {
        new_rows[static_cast<std::size_t>(token)] = num_tokens_;
        add_token(at(step.tokens, token), at(step.positions, token), at(step.slot_mapping, token));
      }
      add_table(i, step, sequence);
    }
    host(kQueryStarts)[count - num_decodes_] = num_tokens_ - num_decodes_;
    num_rows_ = 0;
    for (const int wanted : step.logits_rows) {
      host(kLogitsRows)[num_rows_++] = new_rows[static_cast<std::size_t>(wanted)];
    }
    for (int i = count; i < padded_sequences; ++i) {
      host(kContextLengths)[i] = 0;
      host(kLogitsRows)[i] = num_tokens_;
      add_token(0, 0, -1);
    }
    const std::size_t used = kArrays * stride() + static_cast<std::size_t>(host(kTableStarts)[count]);
    CUDA_CHECK(cudaMemcpyAsync(device_.data(), host_.data(), used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
    copied_.record(stream);
    spread_tables(device_.data() + kArrays * stride(), device(kTableStarts), count, max_blocks_, tables_.data(),
                  stream.get());
  }

  // Of the last upload.
  int num_tokens() const { return num_tokens_; }    // padding included
  int num_decodes() const { return num_decodes_; }  // sequences with one token, padding excluded
  int num_rows() const { return num_rows_; }        // whose logits are wanted, likewise

  int max_blocks() const { return max_blocks_; }
  const int* context_lengths() const { return device(kContextLengths); }
  const int* query_starts() const { return device(kQueryStarts); }  // of the sequences after the decodes, from 0 on
  const int* logits_rows() const { return device(kLogitsRows); }
  const int* tokens() const { return device(kTokens); }
  const int* positions() const { return device(kPositions); }
  const int* slot_mapping() const { return device(kSlots); }
  const int* block_tables() const { return tables_.data(); }  // [max_tokens, max_blocks]

 private:
  enum Array : std::size_t {
    kContextLengths,
    kQueryStarts,
    kLogitsRows,
    kTokens,
    kPositions,
    kSlots,
    kTableStarts,
    kArrays
  };
  std::size_t stride() const { return static_cast<std::size_t>(max_tokens_) + 4; }
  int* host(Array array) const { return host_.data() + array * stride(); }
  const int* device(Array array) const { return device_.data() + array * stride(); }
  static int at(std::span<const int> values, int index) { return values[static_cast<std::size_t>(index)]; }

  void add_token(int token, int position, int slot) {
    host(kTokens)[num_tokens_] = token;
    host(kPositions)[num_tokens_] = position;
    host(kSlots)[num_tokens_] = slot;
    num_tokens_ += 1;
  }

  void add_table(int row, const GpuStep& step, int sequence) {
    const int begin = at(step.table_starts, sequence);
    const int length = at(step.table_starts, sequence + 1) - begin;
    COMMON_CHECK(length <= max_blocks_, "the sequence is longer than the model's context");
    int* const starts = host(kTableStarts);
    std::copy_n(step.block_tables.begin() + begin, length, host_.data() + kArrays * stride() + starts[row]);
    starts[row + 1] = starts[row] + length;
  }

  int max_tokens_;
  int max_blocks_;
  int num_tokens_ = 0;
  int num_decodes_ = 0;
  int num_rows_ = 0;
  common::DeviceArray<int> tables_;
  common::PinnedArray<int> host_;    // the arrays, and then all block tables, one after the other
  common::DeviceArray<int> device_;  // likewise
  common::Event copied_;
};

}  // namespace
