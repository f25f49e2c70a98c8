#include "quoting_runner.h"

namespace stage8 {

void QuotingRunner::enqueue(const RaggedBatch& batch) {
  std::vector<int> positions;
  for (const int row : batch.logits_rows) {
    positions.push_back(batch.positions[static_cast<std::size_t>(row)] + 1);
  }
  if (quoted_.empty() || batch.pending_tokens.empty()) {
    inner_->enqueue(batch);
  } else {
    RaggedBatch known = batch;
    for (const PendingToken& pending : batch.pending_tokens) {
      const auto index = static_cast<std::size_t>(pending.index);
      known.tokens[index] = token_at(batch.positions[index]);
    }
    known.pending_tokens.clear();
    inner_->enqueue(known);
  }
  next_positions_[1] = std::exchange(next_positions_[0], std::move(positions));
}

StepResult QuotingRunner::wait(int step_age) {
  StepResult result = inner_->wait(step_age);
  const std::vector<int>& positions = next_positions_[static_cast<std::size_t>(step_age)];
  for (std::size_t row = 0; !quoted_.empty() && row < result.tokens.size(); ++row) {
    result.tokens[row] = token_at(positions[row]);
  }
  return result;
}

}  // namespace
