// A group of branches as the scheduler sees it. Normally every branch lacks one token in the cache, the last one. A
// group that was driven out lacks everything, and grows again as it grew at first: what all branches have in common is
// computed once, in the first one's sequence, then the others are forked from it, and each computes its rest.
#include <algorithm>

#include "common/base/check.h"
#include "decoding.h"

namespace stage8 {

Work BranchGroup::work() const {
  const KvCacheManager& manager = engine_.manager();
  const SequenceId first = live_.front().sequence;
  if (static_cast<int>(live_.front().tokens.size()) == request_.max_new_tokens) {
    return {};  // the last one is on its way
  }
  if (live_.size() == 1 || !manager.contains(live_.back().sequence)) {
    return {{first}, {trunk_length() - manager.length(first)}, live_.size() == 1};
  }
  Work last_tokens{{}, {}, true};
  Work rest;
  for (const Branch& branch : live_) {
    const int missing = text_length(branch) - manager.length(branch.sequence);
    last_tokens.sequences.push_back(branch.sequence);
    last_tokens.num_tokens.push_back(1);
    if (missing > 1) {
      rest.sequences.push_back(branch.sequence);
      rest.num_tokens.push_back(missing - 1);
    }
  }
  return rest.sequences.empty() ? last_tokens : rest;
}

bool BranchGroup::start(const Admission& admission) {
  const SequenceId first = live_.front().sequence;
  return engine_.start(first, tokens(first, 0, trunk_length()), request_.cache_salt, admission);
}

std::vector<common::Token> BranchGroup::tokens(SequenceId sequence, int first, int count) const {
  const auto branch =
      std::find_if(live_.begin(), live_.end(), [&](const Branch& live) { return live.sequence == sequence; });
  COMMON_CHECK(branch != live_.end() && first >= 0 && first + count <= text_length(*branch), "no such tokens");
  const auto prompt_length = static_cast<int>(request_.prompt.size());
  std::vector<common::Token> result;
  for (int position = first; position < first + count; ++position) {
    result.push_back(position < prompt_length ? request_.prompt[static_cast<std::size_t>(position)]
                                              : branch->tokens[static_cast<std::size_t>(position - prompt_length)]);
  }
  return result;
}

void BranchGroup::free(const Branch& branch) {
  KvCacheManager& manager = engine_.manager();
  // Somebody may have been driven out while his last token was on its way.
  if (manager.contains(branch.sequence) || manager.is_swapped(branch.sequence)) {
    manager.free(branch.sequence);
  }
}

void BranchGroup::computed() {
  KvCacheManager& manager = engine_.manager();
  const SequenceId first = live_.front().sequence;
  if (manager.contains(live_.back().sequence) || manager.length(first) < trunk_length()) {
    return;
  }
  for (std::size_t i = 1; i < live_.size(); ++i) {
    manager.fork(first, live_[i].sequence);
  }
}

void ParallelSampling::take_expected(common::Token token) {
  COMMON_CHECK(token >= 0, "a logit is NaN, or all are -inf");
  live_.front().tokens.pop_back();
  accept({&token, 1});
}

int BranchGroup::trunk_length() const {
  std::size_t common_tokens = live_.front().tokens.size();
  if (live_.size() > 1) {
    common_tokens -= 1;  // each computes its last token itself: the logits after it are its own
  }
  for (const Branch& branch : live_) {
    const auto& tokens = branch.tokens;
    const auto end = tokens.begin() + static_cast<std::ptrdiff_t>(std::min(common_tokens, tokens.size()));
    common_tokens = static_cast<std::size_t>(std::mismatch(tokens.begin(), end, live_.front().tokens.begin()).first -
                                             tokens.begin());
  }
  return static_cast<int>(request_.prompt.size() + common_tokens);
}

int BranchGroup::text_length(const Branch& branch) const {
  return static_cast<int>(request_.prompt.size() + branch.tokens.size());
}

}  // namespace
