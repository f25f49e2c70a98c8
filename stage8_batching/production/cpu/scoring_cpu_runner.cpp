#include "scoring_cpu_runner.h"

#include <vector>

#include "common/model/scored_rows.h"

namespace stage8 {

ScoringCpuRunner::ScoringCpuRunner(const common::Llama& model, const KvCacheShape& shape, const std::string& reason)
    : CpuRunner(model, shape, reason), model_(model) {}

common::Matrix ScoringCpuRunner::forward(const RaggedBatch& batch) {
  const std::vector<common::ScoredRow> rows = take_rows();
  common::Matrix hidden = CpuRunner::forward(batch);
  common::score_rows(model_, hidden, rows);
  return hidden;
}

}  // namespace
