// The log-probabilities of a text that is given, from the passes that compute it as a prompt. Without this, such a text
// is a reply whose tokens are forced (common::Request::forced): a step for each. With it, all but its last token are
// the prompt's, and a step computes as many of them as it has room for: their rows of logits are scored with the step
// (common/model/scored_rows.h).
//
// What is scored has to be computed, so that such a request shares no blocks that others have computed. One that is
// preempted and computed again stores the same scores again, each in its place.
#pragma once

#include <vector>

#include "../../decoding.h"
#include "../../step.h"
#include "common/model/generation.h"
#include "common/model/scored_rows.h"

namespace stage8 {

// The same log-probabilities, from a prompt's steps. Returns the request unchanged if its reply isn't forced to its
// end, or if it asks for no log-probabilities, or those of more than kMaxScoredBest tokens.
common::Request with_scored_prompt(common::Request request);

// Throws InputError if a score of the group could not be computed: a logit was no number, or infinite.
void check_scores(const SequenceGroup& group);

// The rows of the step's batch that its groups need scored.
std::vector<common::ScoredRow> scored_rows(const Step& step);

}  // namespace
