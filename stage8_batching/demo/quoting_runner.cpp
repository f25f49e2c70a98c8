#include "quoting_runner.h"

namespace stage8 {

StepId QuotingRunner::enqueue(const RaggedBatch& batch) {
  std::vector<int> positions;
  for (const int row : batch.logits_rows) {
    positions.push_back(batch.positions[static_cast<std::size_t>(row)] + 1);
  }
  StepId step;
  if (quoted_.empty() || batch.pending_tokens.empty()) {
    step = inner_->enqueue(batch);
  } else {
    RaggedBatch known = batch;
    for (const PendingToken& pending : batch.pending_tokens) {
      const auto index = static_cast<std::size_t>(pending.index);
      known.tokens[index] = token_at(batch.positions[index]);
    }
    known.pending_tokens.clear();
    step = inner_->enqueue(known);
  }
  next_positions_[step.value] = std::move(positions);
  if (next_positions_.size() > 2) {
    next_positions_.erase(next_positions_.begin());
  }
  return step;
}

StepResult QuotingRunner::wait(StepId step) {
  StepResult result = inner_->wait(step);
  const std::vector<int>& positions = next_positions_[step.value];
  for (std::size_t row = 0; !quoted_.empty() && row < result.tokens.size(); ++row) {
    result.tokens[row] = token_at(positions[row]);
  }
  return result;
}

}  // namespace
