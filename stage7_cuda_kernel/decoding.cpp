#include "decoding.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "common/base/check.h"
#include "common/math/sampling.h"

namespace stage7 {
namespace {

std::span<const float> row(const common::Matrix& logits) {
  return {logits.data(), static_cast<std::size_t>(logits.cols())};
}

bool is_stop_token(const common::Request& request, common::Token token) {
  return std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end();
}

}  // namespace

SequenceGroup::SequenceGroup(Engine& engine, common::Request request, SequenceId first_sequence)
    : engine_(engine), request_(std::move(request)), next_sequence_(first_sequence) {
  if (const std::string reason = engine_.rejection(request_); !reason.empty()) {
    throw common::InputError(reason);
  }
  live_.push_back({next_sequence_++, {}, 0.0});
}

SequenceGroup::~SequenceGroup() { free_blocks(); }

void SequenceGroup::free_blocks() {
  for (const Branch& branch : live_) {
    if (engine_.manager().contains(branch.sequence)) {
      free(branch);
    }
  }
}

std::vector<SequenceId> SequenceGroup::sequences() const {
  std::vector<SequenceId> result;
  for (const Branch& branch : live_) {
    if (engine_.manager().contains(branch.sequence)) {
      result.push_back(branch.sequence);
    }
  }
  return result;
}

bool SequenceGroup::step() {
  std::optional<std::vector<common::Matrix>> logits = advance();
  if (logits.has_value()) {
    extend(std::move(*logits));
  }
  return logits.has_value();
}

std::optional<std::vector<common::Matrix>> SequenceGroup::advance() {
  const SequenceId first = live_.front().sequence;
  if (!engine_.manager().contains(first)) {
    if (!engine_.start(first, request_.prompt, request_.cache_salt)) {
      return std::nullopt;
    }
    const auto cached = static_cast<std::size_t>(engine_.manager().length(first));
    const std::span<const common::Token> rest = std::span<const common::Token>(request_.prompt).subspan(cached);
    return std::vector{engine_.append(first, rest).value()};
  }
  if (!engine_.manager().can_reserve(sequences(), 1)) {
    return std::nullopt;
  }
  std::vector<common::Matrix> logits;
  for (const Branch& branch : live_) {
    logits.push_back(engine_.append(branch.sequence, {&branch.tokens.back(), 1}).value());
  }
  return logits;
}

Branch SequenceGroup::fork(std::size_t parent) {
  Branch child = live_[parent];
  live_.reserve(live_.size() + 1);
  child.sequence = next_sequence_++;
  live_.push_back(std::move(child));
  engine_.manager().fork(live_[parent].sequence, live_.back().sequence);
  return live_.back();
}

ParallelSampling::ParallelSampling(Engine& engine, const common::Request& request, int num_samples,
                                   SequenceId first_sequence)
    : SequenceGroup(engine, request, first_sequence) {
  COMMON_CHECK(num_samples > 0, "at least one sample");
  for (int i = 0; i < num_samples; ++i) {
    completions_.push_back({{}, common::FinishReason::kLength, ""});
    sample_of_.push_back(static_cast<std::size_t>(i));
  }
}

void ParallelSampling::extend(std::vector<common::Matrix> logits) {
  while (live_.size() < sample_of_.size()) {  // the prompt has just been computed, once for all samples
    fork(0);
    logits.push_back(logits.front());
  }
  std::vector<common::Token> drawn;
  for (std::size_t i = 0; i < live_.size(); ++i) {
    const std::size_t sample = sample_of_[i];
    drawn.push_back(common::next_token(request_, row(logits[i]), completions_[sample], static_cast<int>(sample)));
  }
  accept(drawn);
}

void ParallelSampling::accept(std::span<const common::Token> drawn) {
  std::vector<bool> ends;  // by live branch
  for (std::size_t i = 0; i < live_.size(); ++i) {
    common::Completion& completion = completions_[sample_of_[i]];
    bool stops = is_stop_token(request_, drawn[i]);
    if (!stops) {
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
}

BeamSearch::BeamSearch(Engine& engine, const common::Request& request, const BeamOptions& options,
                       SequenceId first_sequence)
    : SequenceGroup(engine, request, first_sequence), options_(options) {
  COMMON_CHECK(options.width > 0, "a beam is at least one branch wide");
  COMMON_CHECK(std::isfinite(options.length_penalty) && options.length_penalty >= 0.0, "the length penalty is below 0");
}

void BeamSearch::extend(std::vector<common::Matrix> logits) {
  std::vector<Branch> live;
  std::vector<bool> inherited(live_.size());  // whether a child has taken over the parent's sequence
  for (const Candidate& candidate : best_candidates(logits)) {
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
}

std::vector<BeamSearch::Candidate> BeamSearch::best_candidates(const std::vector<common::Matrix>& logits) const {
  const std::size_t places = static_cast<std::size_t>(options_.width) - hypotheses_.size();
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
  if (is_stop_token(request_, tokens.back())) {
    tokens.pop_back();
  }
  Hypothesis hypothesis{std::move(tokens), log_probability, final_score, reason};
  const auto place =
      std::upper_bound(hypotheses_.begin(), hypotheses_.end(), hypothesis,
                       [](const Hypothesis& left, const Hypothesis& right) { return left.score > right.score; });
  hypotheses_.insert(place, std::move(hypothesis));
}

}  // namespace
