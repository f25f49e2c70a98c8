#include "decoding.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <utility>

#include "common/base/check.h"
#include "common/math/sampling.h"

namespace stage8 {
namespace {

std::span<const float> row(const common::Matrix& logits) {
  return {logits.data(), static_cast<std::size_t>(logits.cols())};
}

bool is_stop_token(const common::Request& request, common::Token token) {
  return std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end();
}

}  // namespace

SequenceGroup::SequenceGroup(KvCacheManager& manager, SequenceIds& ids, int id, common::Request request, TokenSink sink)
    : manager_(manager), ids_(ids), request_(std::move(request)), sink_(std::move(sink)), id_(id) {
  live_.push_back({ids_.take(), {}, 0.0});
}

SequenceGroup::~SequenceGroup() {
  for (const Branch& branch : live_) {
    free(branch);
  }
}

std::vector<SequenceId> SequenceGroup::sequences() const {
  std::vector<SequenceId> result;
  for (const Branch& branch : live_) {
    if (has_blocks(branch.sequence)) {
      result.push_back(branch.sequence);
    }
  }
  return result;
}

ScheduledTokens SequenceGroup::tokens_to_compute() const {
  const SequenceId first = live_.front().sequence;
  if (text_length(live_.front()) == max_tokens() + 1) {
    return {};  // the last token is not known yet
  }
  if (live_.size() == 1 || !manager_.contains(live_.back().sequence)) {
    return {{first}, {common_prefix_length() - manager_.length(first)}, live_.size() == 1};
  }
  return tokens_of_branches();
}

ScheduledTokens SequenceGroup::tokens_of_branches() const {
  ScheduledTokens last_tokens{{}, {}, true};
  ScheduledTokens rest;
  for (const Branch& branch : live_) {
    const int missing = text_length(branch) - manager_.length(branch.sequence);
    last_tokens.sequences.push_back(branch.sequence);
    last_tokens.num_tokens.push_back(1);
    if (missing > 1) {
      rest.sequences.push_back(branch.sequence);
      rest.num_tokens.push_back(missing - 1);
    }
  }
  return rest.sequences.empty() ? last_tokens : rest;
}

bool SequenceGroup::allocate(const Admission& admission) {
  const SequenceId first = live_.front().sequence;
  return manager_.allocate(first, tokens(first, 0, common_prefix_length()), request_.cache_salt, admission);
}

void SequenceGroup::free_blocks() {
  for (const Branch& branch : live_) {
    if (has_blocks(branch.sequence)) {
      manager_.free(branch.sequence);
    }
  }
}

std::vector<common::Token> SequenceGroup::tokens(SequenceId sequence, int first, int count) const {
  const auto branch =
      std::find_if(live_.begin(), live_.end(), [&](const Branch& live) { return live.sequence == sequence; });
  COMMON_CHECK(branch != live_.end() && first >= 0 && first + count <= text_length(*branch), "no such tokens");
  const auto prompt_length = static_cast<int>(request_.prompt.size());
  const int num_known = prompt_length + static_cast<int>(branch->tokens.size());
  std::vector<common::Token> result;
  for (int position = first; position < std::min(first + count, num_known); ++position) {
    result.push_back(position < prompt_length ? request_.prompt[static_cast<std::size_t>(position)]
                                              : branch->tokens[static_cast<std::size_t>(position - prompt_length)]);
  }
  result.resize(static_cast<std::size_t>(count));  // a token that is not known yet is 0
  return result;
}

void SequenceGroup::fork_branches() {
  const SequenceId first = live_.front().sequence;
  if (manager_.contains(live_.back().sequence) || manager_.length(first) < common_prefix_length()) {
    return;
  }
  for (std::size_t i = 1; i < live_.size(); ++i) {
    if (!manager_.contains(live_[i].sequence)) {
      manager_.fork(first, live_[i].sequence);
    }
  }
}

void SequenceGroup::end(common::FinishReason reason, std::string error, double now) {
  for (const Branch& branch : live_) {
    free(branch);
  }
  live_.clear();
  output_.state = RequestState::kFinished;
  output_.finish_reason = reason;
  output_.error = std::move(error);
  output_.end = now;
}

Branch SequenceGroup::fork(std::size_t parent) {
  Branch child = live_[parent];
  live_.reserve(live_.size() + 1);
  child.sequence = ids_.take();
  live_.push_back(std::move(child));
  manager_.fork(live_[parent].sequence, live_.back().sequence);
  return live_.back();
}

void SequenceGroup::free(const Branch& branch) {
  if (has_blocks(branch.sequence)) {  // not if the group was preempted while the step with its last token was in flight
    manager_.free(branch.sequence);
  }
  ids_.give_back(branch.sequence);
}

int SequenceGroup::common_prefix_length() const {
  if (live_.size() == 1) {
    return text_length(live_.front());
  }
  // Each branch computes its last token itself, for its own logits.
  std::size_t common_tokens = live_.front().tokens.size() - 1;
  for (const Branch& branch : live_) {
    const auto& tokens = branch.tokens;
    const auto end = tokens.begin() + static_cast<std::ptrdiff_t>(std::min(common_tokens, tokens.size()));
    common_tokens = static_cast<std::size_t>(std::mismatch(tokens.begin(), end, live_.front().tokens.begin()).first -
                                             tokens.begin());
  }
  return static_cast<int>(request_.prompt.size() + common_tokens);
}

int SequenceGroup::text_length(const Branch& branch) const {
  return static_cast<int>(request_.prompt.size() + branch.tokens.size()) + (pending_row_.has_value() ? 1 : 0);
}

bool SequenceGroup::has_blocks(SequenceId sequence) const {
  return manager_.contains(sequence) || manager_.is_swapped(sequence);
}

ParallelSampling::ParallelSampling(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request,
                                   int num_samples, TokenSink sink)
    : SequenceGroup(manager, ids, id, request, std::move(sink)), num_samples_(num_samples) {
  COMMON_CHECK(num_samples > 0, "at least one sample");
  for (int i = 0; i < num_samples; ++i) {
    sample_of_.push_back(static_cast<std::size_t>(i));
  }
}

void ParallelSampling::extend(GroupResult result, double now) {
  pending_row_.reset();
  output_.completions.resize(static_cast<std::size_t>(num_samples_), {{}, common::FinishReason::kLength, ""});
  while (live_.size() < sample_of_.size()) {  // the prompt has just been computed, once for all samples
    fork(0);
    result.logits.push_back(result.logits.front());
  }
  std::vector<common::Token> drawn;
  for (const common::Token token : result.tokens) {
    drawn.push_back(common::drawn_token(token));
  }
  for (std::size_t i = 0; i < result.logits.size(); ++i) {
    const std::size_t sample = sample_of_[i];
    drawn.push_back(
        common::next_token(request_, row(result.logits[i]), output_.completions[sample], static_cast<int>(sample)));
  }
  accept(drawn, now);
}

std::optional<SamplingRow> ParallelSampling::sampling_row(SequenceId sequence) const {
  if (live_.size() < sample_of_.size() || common::needs_logits(request_)) {
    return std::nullopt;
  }
  std::size_t branch = 0;
  while (live_[branch].sequence != sequence) {
    ++branch;
  }
  SamplingRow sampling{
      common::sampling_options(request_), request_.sample_index + static_cast<int>(sample_of_[branch]), {}};
  if (common::has_penalties(request_.sampling)) {
    sampling.used = tokens(sequence, 0, text_length(live_[branch]) - 1);
    sampling.prompt_length = static_cast<int>(request_.prompt.size());
  }
  return sampling;
}

void ParallelSampling::accept(std::span<const common::Token> drawn, double now) {
  const std::vector<std::size_t> samples = sample_of_;  // by drawn token
  std::vector<bool> ends;                               // by live branch
  for (std::size_t i = 0; i < live_.size(); ++i) {
    common::Completion& completion = output_.completions[sample_of_[i]];
    bool stops = is_stop_token(request_, drawn[i]);
    if (stops) {
      completion.stop_token = drawn[i];
    } else {
      completion.tokens.push_back(drawn[i]);
      stops = request_.stop_strings.found_after(completion.tokens);
    }
    if (stops) {
      completion.finish_reason = common::FinishReason::kStop;
    }
    ends.push_back(stops || static_cast<int>(completion.tokens.size()) == request_.max_new_tokens);
    live_[i].tokens.push_back(drawn[i]);
  }
  // Everything that may throw comes first: until here, no live branch has lost its sequence.
  std::size_t num_live = 0;
  for (std::size_t i = 0; i < live_.size(); ++i) {
    if (ends[i]) {
      free(live_[i]);
      continue;
    }
    std::swap(live_[num_live], live_[i]);
    sample_of_[num_live++] = sample_of_[i];
  }
  live_.resize(num_live);
  sample_of_.resize(num_live);

  // Last, because the sink may throw, and may end the request.
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    if (is_stop_token(request_, drawn[i])) {
      continue;
    }
    if (samples[i] == 0) {
      output_.token_times.push_back(now);
    }
    if (sink_) {
      sink_(id(), static_cast<int>(samples[i]), drawn[i]);
    }
  }
}

BeamSearch::BeamSearch(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request,
                       const BeamOptions& options)
    : SequenceGroup(manager, ids, id, request, nullptr), options_(options) {  // its best text is known only at the end
  COMMON_CHECK(options.width > 0, "a beam is at least one branch wide");
  COMMON_CHECK(std::isfinite(options.length_penalty) && options.length_penalty >= 0.0, "the length penalty is below 0");
}

void BeamSearch::extend(GroupResult result, double /*now*/) {
  std::vector<Branch> live;
  std::vector<bool> inherited(live_.size());  // whether a child has taken over the parent's sequence
  for (const Candidate& candidate : best_candidates(result.logits)) {
    std::vector<common::Token> tokens = live_[candidate.parent].tokens;
    tokens.push_back(candidate.token);
    if (is_stop_token(request_, candidate.token) || request_.stop_strings.found_after(tokens)) {
      finish(std::move(tokens), candidate.log_probability, common::FinishReason::kStop);
      continue;
    }
    live.push_back(inherited[candidate.parent] ? fork(candidate.parent) : live_[candidate.parent]);
    live.back().tokens = std::move(tokens);
    live.back().log_probability = candidate.log_probability;
    inherited[candidate.parent] = true;
  }
  for (std::size_t i = 0; i < inherited.size(); ++i) {
    if (!inherited[i]) {
      free(live_[i]);
    }
  }
  live_ = std::move(live);

  if (!live_.empty() && static_cast<int>(live_.front().tokens.size()) == request_.max_new_tokens) {
    for (const Branch& branch : live_) {
      finish(branch.tokens, branch.log_probability, common::FinishReason::kLength);
    }
    for (const Branch& branch : live_) {
      free(branch);
    }
    live_.clear();
  }
  for (std::size_t i = 0; live_.empty() && i < output_.hypotheses.size(); ++i) {
    const Hypothesis& hypothesis = output_.hypotheses[i];
    output_.completions.push_back({hypothesis.tokens, hypothesis.finish_reason, ""});
    output_.completions.back().stop_token = hypothesis.stop_token;
  }
}

std::vector<BeamSearch::Candidate> BeamSearch::best_candidates(const std::vector<common::Matrix>& logits) const {
  const std::size_t places = static_cast<std::size_t>(options_.width) - output_.hypotheses.size();
  std::vector<Candidate> candidates;
  for (std::size_t parent = 0; parent < live_.size(); ++parent) {
    const std::vector<float> log_probabilities = common::log_softmax(row(logits[parent]));
    for (std::size_t token = 0; token < log_probabilities.size(); ++token) {
      candidates.push_back({parent, static_cast<common::Token>(token),
                            live_[parent].log_probability + static_cast<double>(log_probabilities[token])});
    }
  }
  const auto better = [](const Candidate& left, const Candidate& right) {
    return std::tuple(-left.log_probability, left.parent, left.token) <
           std::tuple(-right.log_probability, right.parent, right.token);
  };
  const std::size_t count = std::min(places, candidates.size());
  std::partial_sort(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(count), candidates.end(),
                    better);
  candidates.resize(count);
  return candidates;
}

double BeamSearch::score(double log_probability, std::size_t length) const {
  return log_probability / std::pow(static_cast<double>(length), options_.length_penalty);
}

void BeamSearch::finish(std::vector<common::Token> tokens, double log_probability, common::FinishReason reason) {
  const double final_score = score(log_probability, tokens.size());
  std::optional<common::Token> stop_token;
  if (is_stop_token(request_, tokens.back())) {
    stop_token = tokens.back();
    tokens.pop_back();
  }
  Hypothesis hypothesis{std::move(tokens), log_probability, final_score, reason, stop_token};
  const auto place =
      std::upper_bound(output_.hypotheses.begin(), output_.hypotheses.end(), hypothesis,
                       [](const Hypothesis& left, const Hypothesis& right) { return left.score > right.score; });
  output_.hypotheses.insert(place, std::move(hypothesis));
}

}  // namespace
