// A GpuRunner that launches a step of one token as a whole: the first such step is recorded as a CUDA graph, and all
// later ones replay the graph with other numbers in the inputs. A step has five launches for each layer and four more;
// one by one, they take the host longer than they take the GPU.
#pragma once

#include <optional>

#include "../gpu_runner.h"
#include "common/cuda/runtime/device.h"

namespace stage7 {

class RecordingRunner : public GpuRunner {
 public:
  using GpuRunner::GpuRunner;

 protected:
  void launch(int num_tokens, int num_rows) override {
    if (num_tokens != 1 || num_rows != 1) {
      GpuRunner::launch(num_tokens, num_rows);
      return;
    }
    if (!decode_step_) {
      decode_step_.emplace(stream(), [&] { GpuRunner::launch(num_tokens, num_rows); });
    }
    decode_step_->launch(stream());
  }

 private:
  std::optional<common::Graph> decode_step_;
};

}  // namespace
