// Several continuations of one prompt: sequences that are forked where their texts diverge, and share all earlier
// blocks.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "common/model/generation.h"
#include "engine.h"

namespace stage7 {

// One continuation.
struct Branch {
  SequenceId sequence = 0;
  std::vector<common::Token> tokens;  // after the prompt; the cache lacks the last one
  double log_probability = 0.0;       // natural logarithm for all tokens together; kept by a beam search only
};

// What parallel sampling and beam search have in common: the live branches. Their sequences end with this object.
class SequenceGroup {
 public:
  // Uses sequence ids from first_sequence upwards. The engine must outlive the group. Throws InputError if the request
  // can never be served.
  SequenceGroup(Engine& engine, common::Request request, SequenceId first_sequence);
  virtual ~SequenceGroup();
  SequenceGroup(const SequenceGroup&) = delete;
  SequenceGroup& operator=(const SequenceGroup&) = delete;

  const std::vector<Branch>& live() const { return live_; }
  bool finished() const { return live_.empty(); }

  // Adds one token to each live branch. Returns false and changes nothing if there are too few blocks; the call can be
  // repeated once some are free.
  bool step();
  // The second half of a step: extends the live branches. logits: [1, vocab_size] for each of them, in order.
  virtual void extend(std::vector<common::Matrix> logits) = 0;
  // Ends the sequences of all live branches.
  void free_blocks();
  // The live branches' sequences that are in the cache.
  std::vector<SequenceId> sequences() const;

 protected:
  // The first half: computes the prompt at first, and after that the last token of every live branch. Returns the
  // logits after each, [1, vocab_size]. Returns nothing and changes nothing if there are too few blocks for all of
  // them.
  std::optional<std::vector<common::Matrix>> advance();

  // Copies that live branch, with a forked sequence of its own. The copy becomes the last live branch, so that its
  // sequence ends with the group even if something throws.
  Branch fork(std::size_t parent);
  // Ends the branch's sequence, and so frees the blocks that no other branch shares.
  void free(const Branch& branch) { engine_.manager().free(branch.sequence); }

  Engine& engine_;
  common::Request request_;
  SequenceId next_sequence_;
  std::vector<Branch> live_;
};

// num_samples texts drawn from one prompt, which is computed once.
class ParallelSampling : public SequenceGroup {
 public:
  // Sample i gets the text that a single request with the index request.sample_index + i gets.
  ParallelSampling(Engine& engine, const common::Request& request, int num_samples, SequenceId first_sequence = 0);

  const std::vector<common::Completion>& completions() const { return completions_; }
  void extend(std::vector<common::Matrix> logits) override;

 private:
  // Appends these tokens, one for each live branch, and ends the branches that are finished.
  void accept(std::span<const common::Token> drawn);

  std::vector<common::Completion> completions_;  // by sample
  std::vector<std::size_t> sample_of_;           // by live branch
};

struct BeamOptions {
  int width = 4;
  // Hypotheses are compared by log_probability / length ^ length_penalty. The penalty is 0 or more: 0 compares sums,
  // which favours short texts, and 1 compares means.
  double length_penalty = 1.0;
};

// A finished text.
struct Hypothesis {
  std::vector<common::Token> tokens;  // without the stop token
  double log_probability = 0.0;       // with the stop token
  double score = 0.0;
  common::FinishReason finish_reason = common::FinishReason::kLength;
};

// Keeps the `width` most probable continuations, finished ones included, and extends each unfinished one by every token
// of the vocabulary. Ties go to the better branch, then to the lower token id. The search ends when all are finished.
class BeamSearch : public SequenceGroup {
 public:
  BeamSearch(Engine& engine, const common::Request& request, const BeamOptions& options, SequenceId first_sequence = 0);

  // The finished texts, best first.
  const std::vector<Hypothesis>& hypotheses() const { return hypotheses_; }
  void extend(std::vector<common::Matrix> logits) override;

 private:
  struct Candidate {
    std::size_t parent = 0;  // the live branch's index
    common::Token token = 0;
    double log_probability = 0.0;
  };

  std::vector<Candidate> best_candidates(const std::vector<common::Matrix>& logits) const;
  double score(double log_probability, std::size_t length) const;
  // tokens: with the stop token, if one was drawn.
  void finish(std::vector<common::Token> tokens, double log_probability, common::FinishReason reason);

  BeamOptions options_;
  std::vector<Hypothesis> hypotheses_;
};

}  // namespace
