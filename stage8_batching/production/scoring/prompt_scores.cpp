#include "prompt_scores.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "common/math/sampling.h"

namespace stage8 {

common::Request with_scored_prompt(common::Request request) {
  std::vector<common::Token>& forced = request.forced;
  if (forced.empty() || static_cast<int>(forced.size()) != request.max_new_tokens || request.num_logprobs < 1 ||
      request.num_logprobs > common::kMaxScoredBest) {
    return request;
  }
  request.num_scored = request.max_new_tokens - 1;
  request.max_new_tokens = 1;
  request.prompt.insert(request.prompt.end(), forced.begin(), forced.end() - 1);
  forced.erase(forced.begin(), forced.end() - 1);
  return request;
}

void check_scores(const SequenceGroup& group) {
  for (int i = 0; i < group.request().num_scored; ++i) {
    common::drawn_token(group.output().completions.front().logprobs[static_cast<std::size_t>(i)].drawn.token);
  }
}

std::vector<common::ScoredRow> scored_rows(const Step& step) {
  std::vector<common::ScoredRow> rows;
  const RaggedBatch& batch = step.batch();
  for (const ScheduledGroup& scheduled : step.groups()) {
    const common::Request& request = scheduled.group->request();
    if (request.num_scored == 0) {
      continue;
    }
    std::vector<common::Completion>& completions = scheduled.group->output().completions;
    const auto num_scored = static_cast<std::size_t>(request.num_scored);
    if (completions.empty()) {
      common::Completion completion{{}, common::FinishReason::kLength, ""};
      completion.logprobs.reserve(num_scored + 1);  // never moved: rows of steps in flight point at them
      completion.logprobs.resize(num_scored);
      completions.push_back(std::move(completion));
    }
    const std::size_t first_scored = request.prompt.size() - num_scored;
    const auto found = std::find(batch.sequences.begin(), batch.sequences.end(), scheduled.tokens.sequences.front());
    const auto sequence = static_cast<std::size_t>(found - batch.sequences.begin());
    for (int row = batch.query_starts[sequence]; row < batch.query_starts[sequence + 1]; ++row) {
      const auto next = static_cast<std::size_t>(batch.positions[static_cast<std::size_t>(row)]) + 1;
      if (next >= first_scored && next < request.prompt.size()) {
        common::TokenLogprobs& result = completions.front().logprobs[next - first_scored];
        rows.push_back({row, request.prompt[next], request.num_logprobs, {scheduled.group, &result}});
      }
    }
  }
  return rows;
}

}  // namespace
