#include "async_step.h"

#include <algorithm>
#include <optional>
#include <span>
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
      if (tokens.with_logits) {
        std::optional<Draw> draw = scheduled.group->draw(sequence);
        draws_tokens_ = draws_tokens_ && draw.has_value();
        batch_.draws.push_back(std::move(draw).value_or(Draw{}));
      }
    }
    if (const std::optional<int> row = scheduled.group->pending_row(); row.has_value() && tokens.with_logits) {
      batch_.pending_tokens.push_back({batch_.num_tokens() - 1, *row});
    }
    are_lone_ = are_lone_ && (!tokens.with_logits || scheduled.group->max_sequences() == 1);
  }
  const auto is_greedy = [](const Draw& draw) { return common::is_greedy(draw.options); };
  if (!draws_tokens_ || std::all_of(batch_.draws.begin(), batch_.draws.end(), is_greedy)) {
    batch_.draws.clear();
  }
}

void InFlightStep::enqueue(Engine& engine, const InFlightStep* previous) {
  if (engine.gpu() == nullptr && previous != nullptr) {
    batch_.resolve_pending(previous->tokens());
  }
  engine.forward(batch_);
  is_enqueued_ = true;
  if (draws_tokens_ && engine.gpu() != nullptr) {
    return;
  }
  const double start = common::now_seconds();
  logits_ = split_rows(engine.logits());
  waiting_seconds_ += engine.gpu() != nullptr ? common::now_seconds() - start : 0.0;
  for (std::size_t i = 0; draws_tokens_ && i < logits_.size(); ++i) {
    const std::span<const float> row(logits_[i].data(), static_cast<std::size_t>(logits_[i].cols()));
    tokens_.push_back(batch_.draws.empty() ? common::argmax(row) : draw(row, i));
  }
}

GroupResult InFlightStep::result(int first, int num_rows) const {
  const auto rows_of = [&](const auto& results) {
    return std::vector(results.begin() + first, results.begin() + first + num_rows);
  };
  if (draws_tokens_) {
    return {rows_of(tokens_), {}};
  }
  return {{}, rows_of(logits_)};
}

common::Token InFlightStep::draw(std::span<const float> logits, std::size_t row) const {
  const Draw& draw = batch_.draws[row];
  const auto last = static_cast<std::size_t>(batch_.logits_rows[row]);
  return common::sample(logits, draw.options, batch_.positions[last] + 1, draw.sample_index, draw.used,
                        {&batch_.tokens[last], 1});
}

void InFlightStep::collect(Engine& engine, int step_age) {
  if (draws_tokens_ && engine.gpu() != nullptr) {
    const double start = common::now_seconds();
    tokens_ = engine.gpu()->drawn_tokens(step_age);
    waiting_seconds_ += common::now_seconds() - start;
  }
}

}  // namespace
