// Guesses how a text goes on, by looking it up in the text itself: "prompt lookup" (Saxena, 2023). A summary, an edit
// or an answer that quotes repeats what the prompt has, and a tale repeats itself. It costs no second model, and
// nothing where nothing repeats.
//
//   text           the king had a  cat . the king had a
//                  \____________/  |     \____________/
//   drafts                         cat . the
#pragma once

#include <span>
#include <vector>

#include "common/base/tensor.h"
#include "token_cost.h"

namespace stage8 {

// How many of the text's last tokens are looked up at most.
inline constexpr int kMaxMatch = 3;

struct Draft {
  std::vector<common::Token> tokens;  // the tokens that followed there; empty: the end has not occurred before
  int matched = 0;                    // how many of the text's last tokens occur there, up to kMaxMatch
};

// Looks for the latest place that has the text's last three tokens, else the last two, else the last one, but not fewer
// than min_match. The draft has max_tokens tokens: where the text ends, it goes on with its own first tokens, as if the
// text went on like this, so that the end "ha ha" gives "ha ha ha".
Draft look_up_draft(std::span<const common::Token> text, int max_tokens, int min_match = 1);

// How many of a text's last tokens must occur before, if drafts cost this much: the dearer they are, the surer one has
// to be, and so the longer its match.
int min_match(const TokenCost& cost);

}  // namespace
