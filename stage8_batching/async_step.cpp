#include "async_step.h"

#include <optional>
#include <utility>

#include "common/base/machine.h"
#include "common/math/sampling.h"

namespace stage8 {
namespace {

// Each row as a matrix of its own: [1, cols].
std::vector<common::Matrix> split_rows(const common::Matrix& rows) {
  std::vector<common::Matrix> result;
  for (Eigen::Index row = 0; row < rows.rows(); ++row) {
    result.emplace_back(rows.row(row));
  }
  return result;
}

}  // namespace

InFlightStep::InFlightStep(const KvCacheManager& manager, std::vector<ScheduledGroup> groups)
    : groups_(std::move(groups)) {
  for (const ScheduledGroup& scheduled : groups_) {
    const ScheduledTokens& tokens = scheduled.tokens;
    for (std::size_t i = 0; i < tokens.sequences.size(); ++i) {
      const SequenceId sequence = tokens.sequences[i];
      batch_.add(manager, sequence, scheduled.group->tokens(sequence, manager.length(sequence), tokens.num_tokens[i]),
                 tokens.with_logits);
    }
    if (const std::optional<int> row = scheduled.group->placeholder_row(); row.has_value() && tokens.with_logits) {
      batch_.pending_tokens.push_back({batch_.num_tokens() - 1, *row});
    }
    is_greedy_ = is_greedy_ && (!tokens.with_logits || scheduled.group->is_greedy());
  }
}

void InFlightStep::enqueue(Engine& engine, const InFlightStep* previous) {
  if (engine.gpu() == nullptr && previous != nullptr) {
    batch_.resolve_pending(previous->tokens());
  }
  engine.forward(batch_);
  is_enqueued_ = true;
  if (is_greedy_ && engine.gpu() != nullptr) {
    return;
  }
  const double start = common::now_seconds();
  logits_ = split_rows(engine.logits());
  waiting_seconds_ += engine.gpu() != nullptr ? common::now_seconds() - start : 0.0;
  for (std::size_t i = 0; is_greedy_ && i < logits_.size(); ++i) {
    tokens_.push_back(common::argmax({logits_[i].data(), static_cast<std::size_t>(logits_[i].cols())}));
  }
}

void InFlightStep::collect(Engine& engine, int step_age) {
  if (is_greedy_ && engine.gpu() != nullptr) {
    const double start = common::now_seconds();
    tokens_ = engine.gpu()->argmax_tokens(step_age);
    waiting_seconds_ += common::now_seconds() - start;
  }
}

}  // namespace
