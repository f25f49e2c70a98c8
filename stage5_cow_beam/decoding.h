// Many continuations of one prompt: sequences that are forked where their texts part, and share every block before.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "common/model/generation.h"
#include "engine.h"

namespace stage5 {

// One of the continuations.
struct Branch {
  SequenceId sequence = 0;
  std::vector<common::Token> tokens;  // after the prompt; the cache lacks the last one
  double log_probability = 0.0;       // of all of them together
};

// What both ways of decoding have in common: the live branches. They end with this object at the latest.
class BranchGroup {
 public:
  // Sequence ids are taken upwards from first_sequence. The engine must outlive the group.
  BranchGroup(Engine& engine, common::Request request, SequenceId first_sequence);
  virtual ~BranchGroup();
  BranchGroup(const BranchGroup&) = delete;
  BranchGroup& operator=(const BranchGroup&) = delete;

  const std::vector<Branch>& live() const { return live_; }
  bool finished() const { return live_.empty(); }

  // One more token for each live branch. False if there are too few blocks: nothing has changed then, and the call can
  // be made again once somebody has freed some.
  bool step();
  // The second half of a step: goes on from the logits that follow each live branch.
  virtual void take(std::vector<common::Matrix> logits) = 0;
  // Gives back all blocks there are.
  void stop();
  // Those that the manager knows.
  std::vector<SequenceId> sequences() const;

 protected:
  // The first half. Computes the prompt at first, and after that the last token of every branch: a row of logits for
  // each. Nothing if the blocks do not suffice for all of them; nothing has changed then.
  std::optional<std::vector<common::Matrix>> advance();

  // A branch like this one, in a sequence of its own.
  Branch fork(const Branch& branch);
  // Gives back the blocks that only this branch has.
  void free(const Branch& branch) { engine_.manager().free(branch.sequence); }

  Engine& engine_;
  common::Request request_;
  SequenceId next_sequence_;
  std::vector<Branch> live_;
};

// num_samples texts drawn from one prompt, which is computed once.
class ParallelSampling : public BranchGroup {
 public:
  // Sample i has the index request.sample_index + i, and gets the text that a lone request with that index gets.
  ParallelSampling(Engine& engine, const common::Request& request, int num_samples, SequenceId first_sequence = 0);

  const std::vector<common::Completion>& completions() const { return completions_; }
  void take(std::vector<common::Matrix> logits) override;

 private:
  // Goes on from these tokens, one a live branch.
  void accept(std::span<const common::Token> drawn);

  std::vector<common::Completion> completions_;  // by sample
  std::vector<std::size_t> sample_of_;           // by live branch
};

struct BeamOptions {
  int width = 4;
  // Hypotheses are compared by log_probability / length ^ length_penalty: 0 favours short ones, 1 compares the means.
  double length_penalty = 1.0;
};

// A text that has come to its end.
struct Hypothesis {
  std::vector<common::Token> tokens;  // without the stop token
  double log_probability = 0.0;       // with it
  double score = 0.0;
  common::FinishReason finish_reason = common::FinishReason::kLength;
};

// Keeps the `width` most probable continuations, the ended ones among them, and extends those that have not ended by
// every token there is. Ties go to the better branch, then to the lower token id. It is over when every place is taken
// by an ended one, or when no live branch can reach the best score any more.
class BeamSearch : public BranchGroup {
 public:
  BeamSearch(Engine& engine, const common::Request& request, const BeamOptions& options, SequenceId first_sequence = 0);

  // Those that have ended, the best first.
  const std::vector<Hypothesis>& hypotheses() const { return hypotheses_; }
  void take(std::vector<common::Matrix> logits) override;

 private:
  struct Candidate {
    std::size_t parent = 0;  // which live branch
    common::Token token = 0;
    double log_probability = 0.0;
  };

  std::vector<Candidate> best_candidates(const std::vector<common::Matrix>& logits) const;
  double score(double log_probability, std::size_t length) const;
  void finish(std::vector<common::Token> tokens, double log_probability, common::FinishReason reason);
  bool can_win(const Branch& branch) const;

  BeamOptions options_;
  std::vector<Hypothesis> hypotheses_;
};

}  // namespace
