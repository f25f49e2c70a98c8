// A runner on the CPU that also scores rows of a step, piece by piece, from the hidden states of its pass, and that
// computes layers with windows (../windows/windowed_attention.h): there, every sequence reads alone.
#pragma once

#include "../scoring/row_scoring.h"
#include "shared_reading_cpu_runner.h"

namespace stage8 {

class ScoringCpuRunner : public SharedReadingCpuRunner, public RowScoring {
 public:
  using SharedReadingCpuRunner::SharedReadingCpuRunner;

 protected:
  common::Matrix forward(const RaggedBatch& batch) override;

 private:
  // As CpuRunner::forward(), with the model's windows.
  common::Matrix windowed_forward(const RaggedBatch& batch);
};

}  // namespace
