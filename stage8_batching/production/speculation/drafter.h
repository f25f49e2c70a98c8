// Guesses how a text goes on, by looking it up in the text itself: "prompt lookup" (Saxena, 2023). A summary, an edit
// or an answer that quotes repeats what the prompt has, and a tale repeats itself. It costs no second model, and
// nothing where nothing repeats.
//
//   text           the king had a  cat . the king had a
//                  \____________/  |     \____________/
//   drafts                         cat . the
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../../batch.h"
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

// A text that may have drafts in the next step.
struct DraftedText {
  int request = 0;          // id
  SequenceId sequence = 0;  // in the server's cache; with the request, it names the text
  std::vector<common::Token> tokens;
  SamplingRow sampling;  // how the token behind them is drawn
  std::uint64_t cache_salt = 0;
  int max_drafts = 0;                 // at least 1
  std::vector<common::Token> drafts;  // what the drafter fills in
};

class Engine;

// Where drafts come from. A step asks for all of its texts at once, so that a model can compute them in one batch.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // How many drafts the text will get, up to max_drafts, so that the next text may have what this one leaves.
  virtual int begin(DraftedText& text) = 0;
  // Fills in the drafts of texts that have begun. Some may get fewer than max_drafts, or none. begin() has promised
  // this many or more: max_drafts may have become smaller since.
  virtual void complete(std::span<DraftedText> texts) = 0;

  // Whether the text's last tokens, this many, would have been drafted without computing anything.
  virtual bool foretells(std::span<const common::Token> /*text*/, int /*num_tokens*/) const { return false; }
  // What the drafter itself takes for a draft, as a share of a step of this engine with one token.
  virtual double cost_of_draft(Engine& /*engine*/) const { return 0.0; }
  // The request has ended.
  virtual void forget(int /*request*/) {}
};

// Looks drafts up. The dearer tokens are, the surer a draft has to be, and so the longer its match.
class LookUp : public Drafter {
 public:
  explicit LookUp(const TokenCost& cost);
  // How many of the text's last tokens must occur before.
  int min_match() const { return min_match_; }

  int begin(DraftedText& text) override;
  void complete(std::span<DraftedText> /*texts*/) override {}
  bool foretells(std::span<const common::Token> text, int num_tokens) const override;

 private:
  int min_match_;
};

}  // namespace
