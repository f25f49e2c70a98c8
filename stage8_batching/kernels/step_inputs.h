// What a step of a CudaRunner reads, and where its tokens go: one copy brings the inputs over, one the tokens back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "../gpu_runner.h"
#include "common/base/check.h"
#include "common/cuda/device.h"
#include "common/cuda/pinned.h"

namespace stage8 {

// Sequences with a single token come first: they are decode attention's, and the others ragged attention's. Where an
// array lies depends on the number of tokens and on the pitch of the block tables alone, so that a recorded step finds
// it again.
class StepInputs {
 public:
  StepInputs(int max_tokens, int max_blocks)
      : max_tokens_(max_tokens),
        max_blocks_(max_blocks),
        host_(std::make_unique<common::PinnedArray<int>>(kBlockTables * stride(max_tokens) + kFirstTables)),
        device_(host_->size()) {}

  // padded_sequences: as many as the step's, or more; those beyond are inactive and have one token each. The last
  // upload, and the step that read it, must be over. True if the arrays had to grow, and so have moved.
  bool upload(const GpuStep& step, int padded_sequences, const common::Stream& stream) {
    const auto count = static_cast<int>(step.context_lengths.size());
    const int num_tokens = static_cast<int>(step.tokens.size()) + padded_sequences - count;
    COMMON_CHECK(count > 0 && count <= padded_sequences, "a step has sequences");
    COMMON_CHECK(num_tokens <= max_tokens_, "a step has at most the tokens that were announced");
    COMMON_CHECK(step.positions.size() == step.tokens.size() && step.slot_mapping.size() == step.tokens.size(),
                 "each token has a position and a slot");
    int longest_table = 1;
    for (int s = 0; s < count; ++s) {
      longest_table = std::max(longest_table, at(step.table_starts, s + 1) - at(step.table_starts, s));
    }
    COMMON_CHECK(longest_table <= max_blocks_, "the sequence is longer than the model's context");
    pitch_ = rounded_pitch(longest_table);
    stride_ = stride(num_tokens);
    const std::size_t used = kBlockTables * stride_ + static_cast<std::size_t>(count) * pitch_;
    const bool grows = used > device_.size();
    if (grows) {
      host_ = std::make_unique<common::PinnedArray<int>>(2 * used);
      device_ = common::DeviceArray<int>(2 * used);
    }

    const auto num_queries = [&](int s) { return at(step.query_starts, s + 1) - at(step.query_starts, s); };
    std::vector<int> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    const auto chunks = std::stable_partition(order.begin(), order.end(), [&](int s) { return num_queries(s) == 1; });
    num_decodes_ = static_cast<int>(chunks - order.begin());
    std::vector<int> new_rows(step.tokens.size());
    num_tokens_ = 0;
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
      std::copy(step.block_tables.begin() + at(step.table_starts, sequence),
                step.block_tables.begin() + at(step.table_starts, sequence + 1),
                host(kBlockTables) + static_cast<std::size_t>(i) * pitch_);
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
    for (const auto& [index, row] : step.pending_tokens) {
      host(kPendingRows)[new_rows[static_cast<std::size_t>(index)]] = row;
    }
    CUDA_CHECK(
        cudaMemcpyAsync(device_.data(), host_->data(), used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
    return grows;
  }

  // Of the last upload.
  int num_tokens() const { return num_tokens_; }    // padding included
  int num_decodes() const { return num_decodes_; }  // sequences with one token, padding excluded
  int num_rows() const { return num_rows_; }        // whose logits are wanted, likewise
  int table_pitch() const { return static_cast<int>(pitch_); }
  const int* context_lengths() const { return device(kContextLengths); }
  const int* query_starts() const { return device(kQueryStarts); }  // of the sequences after the decodes, from 0 on
  const int* logits_rows() const { return device(kLogitsRows); }
  const int* tokens() const { return device(kTokens); }
  // [num_tokens]: which of the step before's rows has drawn the token; -1: the token is known.
  const int* pending_rows() const { return device(kPendingRows); }
  const int* positions() const { return device(kPositions); }
  const int* slot_mapping() const { return device(kSlots); }
  const int* block_tables() const { return device(kBlockTables); }  // [num_sequences, table_pitch]

 private:
  enum Array : std::size_t {
    kContextLengths,
    kQueryStarts,
    kLogitsRows,
    kTokens,
    kPendingRows,
    kPositions,
    kSlots,
    kBlockTables
  };
  static constexpr std::size_t kFirstTables = 1 << 15;  // room for so many entries at first
  // Of whole 16 bytes, and one more than there are tokens.
  static std::size_t stride(int num_tokens) { return static_cast<std::size_t>(num_tokens) / 4 * 4 + 4; }
  // One of a few, since steps are recorded for each: 16, 64, 256, …
  static std::size_t rounded_pitch(int num_blocks) {
    std::size_t pitch = 16;
    while (pitch < static_cast<std::size_t>(num_blocks)) {
      pitch *= 4;
    }
    return pitch;
  }
  int* host(Array array) const { return host_->data() + array * stride_; }
  const int* device(Array array) const { return device_.data() + array * stride_; }
  static int at(std::span<const int> values, int index) { return values[static_cast<std::size_t>(index)]; }

  void add_token(int token, int position, int slot) {
    host(kTokens)[num_tokens_] = token;
    host(kPendingRows)[num_tokens_] = -1;
    host(kPositions)[num_tokens_] = position;
    host(kSlots)[num_tokens_] = slot;
    num_tokens_ += 1;
  }

  int max_tokens_;
  int max_blocks_;
  int num_tokens_ = 0;
  int num_decodes_ = 0;
  int num_rows_ = 0;
  std::size_t stride_ = 0;
  std::size_t pitch_ = 16;
  // The arrays, [stride] each, and then the block tables, [num_sequences, pitch].
  std::unique_ptr<common::PinnedArray<int>> host_;
  common::DeviceArray<int> device_;
};

// Of one of the two steps that can be enqueued at once. While the other one is being computed, this one's inputs and
// tokens are copied in a stream of their own, so that nothing lies between the kernels of two steps; otherwise the
// copies are in the kernels' stream.
class StepBuffers {
 public:
  StepBuffers(int max_tokens, int max_blocks)
      : inputs_(max_tokens, max_blocks), argmax_(static_cast<std::size_t>(max_tokens)), on_host_(argmax_.size()) {}

  // What comes next in `stream` finds the inputs. Waits for the last step that used these buffers. True if the inputs
  // have moved.
  bool begin(const GpuStep& step, int padded_sequences, const StepBuffers& other, const common::Stream& stream) {
    finished_.wait();
    is_aside_ = !other.computed_.is_done();
    const common::Stream& path = is_aside_ ? copies_ : stream;
    const bool moved = inputs_.upload(step, padded_sequences, path);
    if (is_aside_) {
      uploaded_.record(copies_);
      stream.wait(uploaded_);
    }
    return moved;
  }

  // The step has been enqueued: what it leaves in argmax() goes to the host.
  void end(const common::Stream& stream) {
    computed_.record(stream);
    const common::Stream& path = is_aside_ ? copies_ : stream;
    if (is_aside_) {
      copies_.wait(computed_);
    }
    CUDA_CHECK(cudaMemcpyAsync(on_host_.data(), argmax_.data(),
                               static_cast<std::size_t>(inputs_.num_rows()) * sizeof(int), cudaMemcpyDeviceToHost,
                               path.get()));
    finished_.record(path);
  }

  // Between begin and end something has thrown: what was enqueued still reads the inputs, so it has to finish.
  void abandon(const common::Stream& stream) const noexcept {
    (void)cudaStreamSynchronize(copies_.get());
    (void)cudaStreamSynchronize(stream.get());
  }

  const StepInputs& inputs() const { return inputs_; }
  int* argmax() const { return argmax_.data(); }  // device, [num_rows]
  // The same on the host. Waits.
  std::vector<common::Token> argmax_on_host() const {
    finished_.wait();
    return {on_host_.data(), on_host_.data() + inputs_.num_rows()};
  }

 private:
  bool is_aside_ = false;
  common::Stream copies_;
  common::Event uploaded_;
  common::Event computed_;
  common::Event finished_;
  StepInputs inputs_;
  common::DeviceArray<int> argmax_;
  common::PinnedArray<int> on_host_;
};

}  // namespace
