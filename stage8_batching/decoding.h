// Many continuations of one prompt: sequences that are forked where their texts part, and share every block before.
// Together they are what is scheduled: admitted, computed, preempted and resumed as one.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "common/model/generation.h"
#include "kv_cache_manager.h"
#include "sequence_ids.h"

namespace stage8 {

// One of the continuations.
struct Branch {
  SequenceId sequence = 0;
  std::vector<common::Token> tokens;  // after the prompt; the cache lacks the last one
  double log_probability = 0.0;       // of all of them together
};

// Tokens of some sequences of one group, the next ones of each.
struct ScheduledTokens {
  std::vector<SequenceId> sequences;
  std::vector<int> num_tokens;  // by sequence, at least 1
  // The logits after the last of them are wanted. For several sequences: one token each, all in the same step.
  bool with_logits = false;
};

// A request while it is served: its live branches. Normally every branch lacks one token in the cache, the last one. A
// group that was preempted and recomputed lacks everything, and grows again as it grew at first: what all branches have
// in common is computed once, in the first one's sequence, then the others are forked from it, and each computes its
// rest.
class SequenceGroup {
 public:
  // Manager and ids must outlive the group.
  SequenceGroup(KvCacheManager& manager, SequenceIds& ids, common::Request request);
  virtual ~SequenceGroup();
  SequenceGroup(const SequenceGroup&) = delete;
  SequenceGroup& operator=(const SequenceGroup&) = delete;

  const std::vector<Branch>& live() const { return live_; }
  bool finished() const { return live_.empty(); }
  virtual int max_sequences() const = 0;  // at any time
  // In one sequence, at any time. The last token of a text is never computed.
  int max_tokens() const { return static_cast<int>(request_.prompt.size()) + request_.max_new_tokens - 1; }

  // Those that the manager knows, in the cache or swapped out.
  std::vector<SequenceId> sequences() const;
  // Of a group that is in the cache. Empty only while its last token is being computed.
  ScheduledTokens tokens_to_compute() const;
  // Gets its first sequence into the cache. False if there is no room on these terms; nothing has changed then.
  bool allocate(const Admission& admission);
  // Gives all its blocks back, wherever they are; what was computed has to be computed again.
  void free_blocks();

  // The tokens at the sequence's positions first … first + count - 1.
  std::vector<common::Token> tokens(SequenceId sequence, int first, int count) const;
  // Some of the tokens are in the cache now. If all that the branches have in common is, they are forked.
  void on_computed();
  // Goes on from the logits that follow each live branch.
  virtual void take(std::vector<common::Matrix> logits) = 0;

 protected:
  // A branch like this one, in a sequence of its own.
  Branch fork(const Branch& branch);
  // Gives back the blocks that only this branch has.
  void free(const Branch& branch);

  KvCacheManager& manager_;
  SequenceIds& ids_;
  common::Request request_;
  std::vector<Branch> live_;

 private:
  // Of its text, what a lone branch, or the first of several for all of them, gets into the cache first.
  int common_prefix_length() const;
  int text_length(const Branch& branch) const;
  bool has_blocks(const Branch& branch) const;
};

// num_samples texts drawn from one prompt, which is computed once.
class ParallelSampling : public SequenceGroup {
 public:
  // Sample i has the index request.sample_index + i, and gets the text that a lone request with that index gets.
  ParallelSampling(KvCacheManager& manager, SequenceIds& ids, const common::Request& request, int num_samples);

  const std::vector<common::Completion>& completions() const { return completions_; }
  int max_sequences() const override { return static_cast<int>(completions_.size()); }
  void take(std::vector<common::Matrix> logits) override;

  // Whether the token with the largest logit is always the next: then nothing else of the logits is needed.
  bool is_greedy() const { return completions_.size() == 1 && request_.sampling.temperature <= 0.0F; }
  // The next token is being computed, as row `row` of a step: a placeholder stands for it until it is there.
  void push_placeholder(int row);
  void resolve_placeholder(common::Token token);
  std::optional<int> placeholder_row() const { return placeholder_row_; }  // none: all tokens are known

 private:
  // Goes on from these tokens, one a live branch.
  void accept(std::span<const common::Token> drawn);

  std::vector<common::Completion> completions_;  // by sample
  std::vector<std::size_t> sample_of_;           // by live branch
  std::optional<int> placeholder_row_;
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
class BeamSearch : public SequenceGroup {
 public:
  BeamSearch(KvCacheManager& manager, SequenceIds& ids, const common::Request& request, const BeamOptions& options);

  // Those that have ended, the best first.
  const std::vector<Hypothesis>& hypotheses() const { return hypotheses_; }
  int max_sequences() const override { return options_.width; }
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
