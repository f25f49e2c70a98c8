#include "speculating_scheduler.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "look_up.h"

namespace stage8 {
namespace {

constexpr int kFirstPause = 16;
constexpr int kMaxPause = 256;
constexpr double kMaxBalance = 4.0;  // so that it is soon noticed when a text no longer repeats

}  // namespace

DraftAccount::DraftAccount(const TokenCost& cost) : cost_(cost), length_(kFirstDrafts), next_pause_(kFirstPause) {}

bool DraftAccount::may_draft() {
  pause_ = std::max(pause_ - 1, 0);
  return pause_ == 0;
}

void DraftAccount::book(int num_drafts, int num_accepted, int num_sequences) {
  const double step = 1.0 + cost_.per_token * (num_sequences - 1);  // with a token of each
  const double saved = num_accepted * step;
  const double cost =
      cost_.per_token * num_drafts * num_sequences + (num_drafts > 0 ? cost_.per_step : 0.0) + cost_.waiting;
  balance_ = std::min(balance_ + saved - cost, kMaxBalance);
  if (num_drafts > 0 && num_accepted == num_drafts) {
    length_ = is_steady_ ? 2 * num_drafts + 1 : num_drafts;
    next_pause_ = saved >= cost ? kFirstPause : next_pause_;  // where not even that pays, pauses grow
  } else if (num_drafts > 0) {
    length_ = kFirstDrafts;
  }
  is_steady_ = num_drafts > 0 ? num_accepted == num_drafts : is_steady_;
  if (balance_ < 0.0) {
    balance_ = 0.0;
    pause_ = std::exchange(next_pause_, std::min(2 * next_pause_, kMaxPause));
  }
}

int DraftAccount::num_drafts(int max_drafts) const { return std::min(length_, max_drafts); }

SpeculatingScheduler::SpeculatingScheduler(KvCacheManager& manager, const SchedulerOptions& options,
                                           bool use_prefix_cache, int default_drafts, const TokenCost& cost)
    : Scheduler(manager, options, use_prefix_cache),
      default_drafts_(default_drafts),
      cost_(cost),
      min_match_(min_match(cost)) {}

ScheduledStep SpeculatingScheduler::schedule() {
  drafts_.clear();
  is_awaited_ = false;
  ScheduledStep step = Scheduler::schedule();
  for (const ScheduledGroup& scheduled : step.groups) {
    add_drafts(scheduled, step);
  }
  forget_ended();
  return step;
}

bool SpeculatingScheduler::find_room(SequenceGroup& group, const Admission& admission) {
  Admission terms = admission;
  terms.use_prefix_cache = terms.use_prefix_cache && group.request().num_scored == 0;
  return Scheduler::find_room(group, terms);
}

std::span<const common::Token> SpeculatingScheduler::drafts_of(SequenceId sequence) const {
  const auto found = drafts_.find(sequence);
  return found == drafts_.end() ? std::span<const common::Token>() : found->second;
}

void SpeculatingScheduler::count_accepted(const SequenceGroup& group) {
  if (const auto found = accounts_.find(group.id()); found != accounts_.end()) {
    found->second.accepted += 1;
  }
}

int SpeculatingScheduler::max_drafts(const SequenceGroup& group) const {
  const bool is_beam_search = dynamic_cast<const BeamSearch*>(&group) != nullptr;
  const int wanted = group.request().num_speculative_tokens.value_or(default_drafts_);
  return is_beam_search ? 0 : std::clamp(wanted, 0, common::kMaxDrafts);
}

void SpeculatingScheduler::add_drafts(const ScheduledGroup& scheduled, ScheduledStep& step) {
  const SequenceGroup& group = *scheduled.group;
  const ScheduledTokens& tokens = scheduled.tokens;
  const int wanted = max_drafts(group);
  const auto num_sequences = static_cast<int>(tokens.sequences.size());
  const int room = std::min(cost_.max_tokens - step.num_tokens, budget_left(step)) / num_sequences;
  if (wanted == 0 || !tokens.with_logits || room <= 0) {
    return;
  }
  Request& request = find(group);
  // A request that pauses looks on, where it costs nothing: behind the step in flight.
  if (!request.account.may_draft()) {
    if (cost_.waiting == 0.0 || !would_have_been_right(group)) {
      return;
    }
    request.account.resume();
  }
  // If this step ran ahead, the next one could not draft from what it draws.
  is_awaited_ = true;
  const bool is_decoding =
      !group.live().front().tokens.empty() && !group.pending_row().has_value() &&
      std::all_of(tokens.num_tokens.begin(), tokens.num_tokens.end(), [](int n) { return n == 1; });
  if (!is_decoding) {
    return;
  }
  request.waits = true;
  // Never longer than the text may become.
  int num_drafts = std::min(request.account.num_drafts(wanted), room);
  for (const SequenceId sequence : tokens.sequences) {
    num_drafts = std::min(num_drafts, group.max_tokens() - manager_.length(sequence) - 1);
  }
  std::vector<std::vector<common::Token>> drafts;  // by sequence
  for (const SequenceId sequence : tokens.sequences) {
    if (num_drafts > 0) {
      const std::vector<common::Token> text = group.tokens(sequence, 0, manager_.length(sequence) + 1);
      drafts.push_back(look_up_draft(text, num_drafts, min_match_).tokens);
      num_drafts = static_cast<int>(drafts.back().size());
    }
  }
  num_drafts = num_drafts > 0 ? reserve_drafts(tokens.sequences, num_drafts) : 0;
  if (num_drafts == 0) {
    return;
  }
  for (std::size_t i = 0; i < drafts.size(); ++i) {
    drafts[i].resize(static_cast<std::size_t>(num_drafts));  // as many for all texts of a group
    drafts_[tokens.sequences[i]] = std::move(drafts[i]);
  }
  request.drafts = num_drafts;
  request.num_sequences = num_sequences;
  step.num_tokens += num_sequences * num_drafts;
}

bool SpeculatingScheduler::would_have_been_right(const SequenceGroup& group) const {
  constexpr int kSeen = 2;  // right ones in a row
  const Branch& branch = group.live().front();
  if (branch.tokens.size() < kSeen) {
    return false;
  }
  const auto known = static_cast<int>(group.request().prompt.size() + branch.tokens.size());
  const std::vector<common::Token> text = group.tokens(branch.sequence, 0, known);
  const std::span before = std::span(text).first(text.size() - kSeen);
  const std::vector<common::Token> drafts = look_up_draft(before, kSeen, min_match_).tokens;
  return std::equal(drafts.begin(), drafts.end(), text.end() - kSeen, text.end());
}

int SpeculatingScheduler::reserve_drafts(const std::vector<SequenceId>& sequences, int num_drafts) {
  while (num_drafts > 0 && !manager_.can_reserve(sequences, 1 + num_drafts)) {
    --num_drafts;
  }
  for (const SequenceId sequence : sequences) {
    manager_.reserve(sequence, 1 + num_drafts);
  }
  return num_drafts;
}

SpeculatingScheduler::Request& SpeculatingScheduler::find(const SequenceGroup& group) {
  Request& request = accounts_.try_emplace(group.id(), Request{DraftAccount(cost_)}).first->second;
  if (request.drafts > 0 || request.waits) {
    request.account.book(request.drafts, request.accepted, request.num_sequences);
  }
  request.waits = false;
  request.drafts = 0;
  request.accepted = 0;
  return request;
}

void SpeculatingScheduler::forget_ended() {
  if (accounts_.size() <= running().size() + waiting().size()) {
    return;
  }
  std::set<int> served;
  for (const auto& group : running()) {
    served.insert(group->id());
  }
  for (const auto& group : waiting()) {
    served.insert(group->id());
  }
  std::erase_if(accounts_, [&](const auto& entry) { return !served.contains(entry.first); });
}

}  // namespace
