// What a runner is that also scores rows of a step (prompt_scores.h): log-probabilities of tokens that are known
// already. On a CPU: ../cpu/scoring_cpu_runner.h. On a GPU: ../recording_runner.h.
#pragma once

#include <utility>
#include <vector>

#include "common/model/scored_rows.h"

namespace stage8 {

class RowScoring {
 public:
  virtual ~RowScoring() = default;

  // The next step that is enqueued scores these rows of its batch; if it fails, nothing scores them. They have their
  // scores once the step has been waited for. For logits from which no token can be drawn, see StepResult.
  void score_next(std::vector<common::ScoredRow> rows) { next_ = std::move(rows); }

 protected:
  std::vector<common::ScoredRow> take_rows() { return std::exchange(next_, {}); }

 private:
  std::vector<common::ScoredRow> next_;
};

}  // namespace
