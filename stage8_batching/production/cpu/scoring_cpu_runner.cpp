#include "scoring_cpu_runner.h"

#include <vector>

#include "common/model/scored_rows.h"

namespace stage8 {

common::Matrix ScoringCpuRunner::forward(const RaggedBatch& batch) {
  const std::vector<common::ScoredRow> rows = take_rows();
  common::Matrix hidden = SharedReadingCpuRunner::forward(batch);
  common::score_rows(model_, hidden, rows);
  return hidden;
}

}  // namespace
