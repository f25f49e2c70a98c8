// The inputs and the tokens of a step in flight: which stream copies them, and which work waits for which.
#pragma once

#include <cstddef>
#include <vector>

#include "../batch.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "step_inputs.h"

namespace stage8 {

// The buffers of one of the two steps that can be in flight at once. While the other step is computed, this step's
// inputs and tokens are copied in a stream of their own, so that nothing stands between the kernels of two steps;
// otherwise the copies are in the kernels' stream.
class StepBuffers {
 public:
  StepBuffers(int max_tokens, int max_sequences, int max_rows, int max_blocks)
      : inputs_(max_tokens, max_sequences, max_rows, max_blocks),
        argmax_(static_cast<std::size_t>(max_rows)),
        on_host_(argmax_.size()) {}

  // Waits for the last step that used these buffers. Returns the stream that copies the inputs; more may be copied in
  // it. Work enqueued in `stream` after end_uploads() finds them.
  const common::Stream& begin(const RaggedBatch& step, int block_size, int padded_sequences, const StepBuffers& other,
                              const common::Stream& stream) {
    finished_.wait();
    returned_rows_.clear();
    for (std::size_t row = 0; row < step.logits_rows.size(); ++row) {
      if (!step.draws_token(row)) {
        returned_rows_.push_back(row);
      }
    }
    uses_own_stream_ = !other.computed_.is_done();
    const common::Stream& path = uses_own_stream_ ? copies_ : stream;
    inputs_.upload(step, block_size, padded_sequences, path);
    return path;
  }
  void end_uploads(const common::Stream& stream) {
    if (uses_own_stream_) {
      uploaded_.record(copies_);
      stream.wait(uploaded_);
    }
  }

  // Called when the step is enqueued: copies what the step stores in argmax() to the host.
  void end(const common::Stream& stream) {
    computed_.record(stream);
    const common::Stream& path = uses_own_stream_ ? copies_ : stream;
    if (uses_own_stream_) {
      copies_.wait(computed_);
    }
    CUDA_CHECK(cudaMemcpyAsync(on_host_.data(), argmax_.data(),
                               static_cast<std::size_t>(inputs_.num_rows()) * sizeof(int), cudaMemcpyDeviceToHost,
                               path.get()));
    finished_.record(path);
  }

  // Called if something throws between begin and end: enqueued work still reads the inputs, so it has to finish.
  void abandon(const common::Stream& stream) const noexcept {
    (void)cudaStreamSynchronize(copies_.get());
    (void)cudaStreamSynchronize(stream.get());
  }

  // Whether the last step that used these buffers has ended, and its tokens are on the host.
  bool is_finished() const { return finished_.is_done(); }

  const std::vector<std::size_t>& returned_rows() const { return returned_rows_; }  // whose logits the batch asked for
  const StepInputs& inputs() const { return inputs_; }
  int* argmax() const { return argmax_.data(); }  // on the device, [num_rows]; drawn tokens replace some at the end
  // The same on the host. Waits for the step.
  std::vector<common::Token> argmax_on_host() const {
    finished_.wait();
    return {on_host_.data(), on_host_.data() + inputs_.num_rows()};
  }

 private:
  std::vector<std::size_t> returned_rows_;
  bool uses_own_stream_ = false;
  common::Stream copies_;
  common::Event uploaded_;
  common::Event computed_;
  common::Event finished_;
  StepInputs inputs_;
  common::DeviceArray<int> argmax_;
  common::PinnedArray<int> on_host_;
};

}  // namespace
