// A runner on the CPU that also scores rows of a step, piece by piece, from the hidden states of its pass.
#pragma once

#include "../scoring/row_scoring.h"
#include "shared_reading_cpu_runner.h"

namespace stage8 {

class ScoringCpuRunner : public SharedReadingCpuRunner, public RowScoring {
 public:
  using SharedReadingCpuRunner::SharedReadingCpuRunner;

 protected:
  common::Matrix forward(const RaggedBatch& batch) override;
};

}  // namespace
