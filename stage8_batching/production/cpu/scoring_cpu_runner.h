// A CpuRunner that also scores rows of a step, piece by piece, from the hidden states of its pass.
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
  const common::Llama& model_;
};

}  // namespace
