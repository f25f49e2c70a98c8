// A CpuRunner that also scores rows of a step, piece by piece, from the hidden states of its pass, and that computes
// layers with windows (../windows/windowed_attention.h).
#pragma once

#include <string>

#include "../../cpu_runner.h"
#include "../scoring/row_scoring.h"

namespace stage8 {

class ScoringCpuRunner : public CpuRunner, public RowScoring {
 public:
  // As CpuRunner.
  ScoringCpuRunner(const common::Llama& model, const KvCacheShape& shape, const std::string& reason);

 protected:
  common::Matrix forward(const RaggedBatch& batch) override;

 private:
  // As CpuRunner::forward(), with the model's windows.
  common::Matrix windowed_forward(const RaggedBatch& batch);

  const common::Llama& model_;
};

}  // namespace
