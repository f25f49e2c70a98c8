#include "speculating_scheduler.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace stage8 {

namespace {

constexpr int kFirstPause = 16;
constexpr int kMaxPause = 256;
constexpr double kMaxBalance = 4.0;  // so that it is soon noticed when a text no longer repeats

// Which of the request's samples the sequence is. Live branches keep the order of their samples, and each has the
// tokens of its own.
int sample_of(const SequenceGroup& group, SequenceId sequence) {
  const std::vector<common::Completion>& completions = group.output().completions;
  std::size_t sample = 0;
  for (const Branch& branch : group.live()) {
    while (sample + 1 < completions.size() && completions[sample].tokens != branch.tokens) {
      ++sample;
    }
    if (branch.sequence == sequence) {
      break;
    }
    ++sample;
  }
  return static_cast<int>(sample);
}

// num_tokens: how many of its tokens are known. A request that needs logits draws on the host, and has no row that says
// how.
DraftedText drafted_text(const SequenceGroup& group, SequenceId sequence, int num_tokens) {
  const common::Request& request = group.request();
  DraftedText text;
  text.request = group.id();
  text.sequence = sequence;
  text.tokens = group.tokens(sequence, 0, num_tokens);
  text.cache_salt = request.cache_salt;
  if (std::optional<SamplingRow> sampling = group.sampling_row(sequence)) {
    text.sampling = std::move(*sampling);
  } else {
    text.sampling.options = common::sampling_options(request);
    text.sampling.sample_index = request.sample_index + sample_of(group, sequence);
    text.sampling.used.assign(text.tokens.begin(), text.tokens.end() - 1);
    text.sampling.prompt_length = static_cast<int>(request.prompt.size());
  }
  return text;
}

}  // namespace

DraftAccount::DraftAccount(const TokenCost& cost) : cost_(cost), length_(kFirstDrafts), next_pause_(kFirstPause) {}

bool DraftAccount::may_draft() {
  pause_ = std::max(pause_ - 1, 0);
  return pause_ == 0;
}

void DraftAccount::book(int num_drafts, int num_accepted, int num_sequences) {
  const double step = 1.0 + cost_.per_token * (num_sequences - 1);  // with a token of each
  const double saved = num_accepted * step;
  double cost = cost_.per_token * num_drafts * num_sequences + (num_drafts > 0 ? cost_.per_step : 0.0) + cost_.waiting;
  // A model that drafts takes a step for each draft, and computes those that become text once more.
  cost += cost_.per_draft * (num_drafts * step + cost_.per_token * num_accepted * num_sequences);
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
                                           bool use_prefix_cache, int default_drafts, const TokenCost& cost,
                                           std::shared_ptr<Drafter> drafter)
    : Scheduler(manager, options, use_prefix_cache),
      default_drafts_(default_drafts),
      cost_(cost),
      drafter_(std::move(drafter)) {}

SpeculatingScheduler::SpeculatingScheduler(KvCacheManager& manager, const SchedulerOptions& options,
                                           bool use_prefix_cache, int default_drafts, const TokenCost& cost)
    : SpeculatingScheduler(manager, options, use_prefix_cache, default_drafts, cost, std::make_shared<LookUp>(cost)) {}

SpeculatingScheduler::~SpeculatingScheduler() {
  for (const auto& [id, request] : requests_) {
    drafter_->forget(id);
  }
}

ScheduledStep SpeculatingScheduler::schedule() {
  drafts_.clear();
  is_awaited_ = false;
  ScheduledStep step = Scheduler::schedule();
  std::vector<DraftedText> begun;
  for (const ScheduledGroup& scheduled : step.groups) {
    begin_drafts(scheduled, step, begun);
  }
  forget_ended();
  complete_drafts(std::move(begun), step);
  return step;
}

std::span<const common::Token> SpeculatingScheduler::drafts_of(SequenceId sequence) const {
  const auto found = drafts_.find(sequence);
  return found == drafts_.end() ? std::span<const common::Token>() : found->second;
}

void SpeculatingScheduler::count_accepted(const SequenceGroup& group) {
  if (const auto found = requests_.find(group.id()); found != requests_.end()) {
    found->second.accepted += 1;
  }
}

int SpeculatingScheduler::max_drafts(const SequenceGroup& group) const {
  const bool is_beam_search = dynamic_cast<const BeamSearch*>(&group) != nullptr;
  return is_beam_search ? 0 : group.request().num_speculative_tokens.value_or(default_drafts_);
}

void SpeculatingScheduler::begin_drafts(const ScheduledGroup& scheduled, ScheduledStep& step,
                                        std::vector<DraftedText>& begun) {
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
    if (cost_.waiting == 0.0 || !foretells(group)) {
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
  std::vector<DraftedText> texts;
  for (const SequenceId sequence : tokens.sequences) {
    if (num_drafts > 0) {
      texts.push_back(drafted_text(group, sequence, manager_.length(sequence) + 1));
      texts.back().max_drafts = num_drafts;
      num_drafts = drafter_->begin(texts.back());
    }
  }
  num_drafts = num_drafts > 0 ? reserve_drafts(tokens.sequences, num_drafts) : 0;
  if (num_drafts == 0) {
    return;
  }
  for (DraftedText& text : texts) {
    text.max_drafts = num_drafts;
    begun.push_back(std::move(text));
  }
  step.num_tokens += num_sequences * num_drafts;
}

void SpeculatingScheduler::complete_drafts(std::vector<DraftedText> begun, ScheduledStep& step) {
  if (begun.empty()) {
    return;
  }
  drafter_->complete(begun);
  for (auto first = begun.begin(); first != begun.end();) {
    const auto is_others = [&](const DraftedText& text) { return text.request != first->request; };
    const auto end = std::find_if(first, begun.end(), is_others);
    const auto num_sequences = static_cast<int>(end - first);
    // As many for all texts of a group.
    int num_drafts = first->max_drafts;
    for (auto text = first; text != end; ++text) {
      num_drafts = std::min(num_drafts, static_cast<int>(text->drafts.size()));
    }
    step.num_tokens -= num_sequences * (first->max_drafts - num_drafts);
    Request& request = requests_.at(first->request);
    request.drafts = num_drafts;
    request.num_sequences = num_sequences;
    for (; first != end; ++first) {
      first->drafts.resize(static_cast<std::size_t>(num_drafts));
      if (num_drafts > 0) {
        drafts_[first->sequence] = std::move(first->drafts);
      }
    }
  }
}

bool SpeculatingScheduler::foretells(const SequenceGroup& group) const {
  constexpr int kSeen = 2;  // right ones in a row
  const Branch& branch = group.live().front();
  const auto known = static_cast<int>(group.request().prompt.size() + branch.tokens.size());
  return static_cast<int>(branch.tokens.size()) >= kSeen &&
         drafter_->foretells(group.tokens(branch.sequence, 0, known), kSeen);
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
  Request& request = requests_.try_emplace(group.id(), Request{DraftAccount(cost_)}).first->second;
  if (request.drafts > 0 || request.waits) {
    request.account.book(request.drafts, request.accepted, request.num_sequences);
  }
  request.waits = false;
  request.drafts = 0;
  request.accepted = 0;
  return request;
}

void SpeculatingScheduler::forget_ended() {
  if (requests_.size() <= running().size() + waiting().size()) {
    return;
  }
  std::set<int> served;
  for (const auto& group : running()) {
    served.insert(group->id());
  }
  for (const auto& group : waiting()) {
    served.insert(group->id());
  }
  std::erase_if(requests_, [&](const auto& entry) {
    const bool has_ended = !served.contains(entry.first);
    if (has_ended) {
      drafter_->forget(entry.first);
    }
    return has_ended;
  });
}

}  // namespace
