#include "step.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/math/sampling.h"

namespace stage8 {
namespace {

bool is_single(int num_tokens) { return num_tokens == 1; }

}  // namespace

Step::Step(const KvCacheManager& manager, std::vector<ScheduledGroup> groups) : groups_(std::move(groups)) {
  // A group with rows of logits has one token for each sequence, or a single sequence.
  std::stable_partition(groups_.begin(), groups_.end(), [](const ScheduledGroup& scheduled) {
    const std::vector<int>& counts = scheduled.tokens.num_tokens;
    return std::all_of(counts.begin(), counts.end(), is_single);
  });
  for (const bool single : {true, false}) {
    for (const ScheduledGroup& scheduled : groups_) {
      add(manager, scheduled, single);
    }
  }
  const auto is_greedy = [](const SamplingRow& row) { return row.draws_token && common::is_greedy(row.options); };
  if (std::all_of(batch_.sampling_rows.begin(), batch_.sampling_rows.end(), is_greedy)) {
    batch_.sampling_rows.clear();
  }
}

void Step::add(const KvCacheManager& manager, const ScheduledGroup& scheduled, bool single) {
  const ScheduledTokens& tokens = scheduled.tokens;
  for (std::size_t i = 0; i < tokens.sequences.size(); ++i) {
    if (is_single(tokens.num_tokens[i]) != single) {
      continue;
    }
    const SequenceId sequence = tokens.sequences[i];
    batch_.add(manager, sequence, scheduled.group->tokens(sequence, manager.length(sequence), tokens.num_tokens[i]),
               tokens.with_logits);
    owners_.push_back(scheduled.group.get());
    if (!tokens.with_logits) {
      continue;
    }
    std::optional<SamplingRow> sampling = scheduled.group->sampling_row(sequence);
    can_run_ahead_ = can_run_ahead_ && sampling.has_value() && scheduled.group->max_sequences() == 1;
    batch_.sampling_rows.push_back(std::move(sampling).value_or(SamplingRow{.draws_token = false}));
    if (const std::optional<int> row = scheduled.group->pending_row()) {
      batch_.pending_tokens.push_back({batch_.num_tokens() - 1, *row});
    }
  }
}

void Step::enqueued(StepId id, std::size_t num_rows, bool runs_ahead) {
  id_ = id;
  num_rows_ = num_rows;
  runs_ahead_ = runs_ahead;
}

void Step::confirm(KvCacheManager& manager, std::span<const common::Token> drawn) noexcept {
  if (!drawn.empty()) {
    batch_.resolve_pending(drawn);
  }
  for (std::size_t i = 0; i < batch_.num_sequences(); ++i) {
    if (!owners_[i]->finished()) {
      manager.commit(batch_.sequences[i], batch_.num_queries(i));
    }
  }
  int row = 0;
  for (const ScheduledGroup& scheduled : groups_) {
    if (runs_ahead_ && scheduled.num_rows() > 0 && !scheduled.group->finished()) {
      scheduled.group->run_ahead(row);
    }
    row += scheduled.num_rows();
  }
}

void Step::collect(Runner& runner) {
  const double start = common::now_seconds();
  StepResult result = runner.wait(id_);
  waiting_seconds_ += runner.is_asynchronous() ? common::now_seconds() - start : 0.0;
  COMMON_CHECK(result.tokens.size() == num_rows_ && result.logits.size() == num_rows_,
               "the result of a step has a row for each that was asked for");
  tokens_ = std::move(result.tokens);
  logits_ = std::move(result.logits);
}

void Step::publish(KvCacheManager& manager) const {
  for (std::size_t i = 0; i < batch_.num_sequences(); ++i) {
    if (!owners_[i]->finished() && owners_[i]->has_blocks(batch_.sequences[i])) {
      manager.publish(batch_.sequences[i], batch_.tokens_of(i));
    }
  }
}

GroupResult Step::result(int first, int num_rows) const {
  COMMON_CHECK(first >= 0 && num_rows >= 0 && first + num_rows <= static_cast<int>(tokens_.size()),
               "the step has no such rows");
  GroupResult result;
  for (int i = first; i < first + num_rows; ++i) {
    const auto row = static_cast<std::size_t>(i);
    if (logits_[row].size() == 0) {
      result.tokens.push_back(tokens_[row]);
    } else {
      result.logits.push_back(logits_[row]);
    }
  }
  return result;
}

}  // namespace
