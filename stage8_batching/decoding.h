// Several continuations of one prompt: sequences that are forked where their texts diverge, and share all blocks
// before. They are scheduled as one group: admitted, computed, preempted and resumed together.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "batch.h"
#include "common/model/generation.h"
#include "kv_cache_manager.h"

namespace stage8 {

// Hands out ids for sequences. An id that was given back is used again, so that ids stay small.
class SequenceIds {
 public:
  SequenceId take() {
    if (unused_.empty()) {
      const std::size_t num_ids = static_cast<std::size_t>(next_) + 1;
      if (unused_.capacity() < num_ids) {
        unused_.reserve(2 * num_ids);  // to give an id back must need no memory
      }
      return next_++;
    }
    const SequenceId sequence = unused_.back();
    unused_.pop_back();
    return sequence;
  }
  void give_back(SequenceId sequence) { unused_.push_back(sequence); }

 private:
  SequenceId next_ = 0;
  std::vector<SequenceId> unused_;
};

// One of the continuations.
struct Branch {
  SequenceId sequence = 0;
  std::vector<common::Token> tokens;  // after the prompt; the cache lacks the last one
  double log_probability = 0.0;       // natural logarithm, of all of them together; a beam search keeps it
};

// The next tokens of some of a group's sequences.
struct ScheduledTokens {
  std::vector<SequenceId> sequences;
  std::vector<int> num_tokens;  // by sequence, at least 1
  // Whether the logits after the last token are wanted. If so, several sequences have one token each, all in the same
  // step.
  bool with_logits = false;
};

// A request that is being served: its live branches. Normally the cache lacks one token of every branch, the last one.
// After a preemption it may lack everything; then the prefix that all branches have in common is computed once, in the
// first branch's sequence, the others are forked from it, and each computes its own rest.
class SequenceGroup {
 public:
  // Manager and ids must outlive the group. id: the request's.
  SequenceGroup(KvCacheManager& manager, SequenceIds& ids, int id, common::Request request);
  virtual ~SequenceGroup();
  SequenceGroup(const SequenceGroup&) = delete;
  SequenceGroup& operator=(const SequenceGroup&) = delete;

  int id() const { return id_; }
  const std::vector<Branch>& live() const { return live_; }
  bool finished() const { return live_.empty(); }
  virtual int max_sequences() const = 0;  // max live branches
  // Max tokens of one sequence in the cache. The last token of a text is never computed.
  int max_tokens() const { return static_cast<int>(request_.prompt.size()) + request_.max_new_tokens - 1; }

  // The live branches' sequences that are in the cache or swapped out.
  std::vector<SequenceId> sequences() const;
  // What the cache lacks of a group that it holds. Empty only while the last token is being computed.
  ScheduledTokens tokens_to_compute() const;
  // Starts the first branch's sequence with room for the common prefix. Returns false and changes nothing if there is
  // no room on these terms.
  bool allocate(const Admission& admission);
  // Ends all its sequences, in the cache or swapped out: everything will have to be computed again.
  void free_blocks();

  // The tokens at the sequence's positions first … first + count - 1.
  std::vector<common::Token> tokens(SequenceId sequence, int first, int count) const;
  // To be called when some of the tokens have been committed. Once the common prefix is complete, forks the other
  // branches.
  void on_computed();
  // Extends the live branches. logits: [1, vocab_size] for each of them, in order.
  virtual void take(std::vector<common::Matrix> logits) = 0;

  // Whether each live branch goes on from a token drawn from its row of logits, of which nothing else is needed.
  virtual bool takes_tokens() const { return false; }
  // How that token is drawn.
  virtual Draw draw(SequenceId) const { return {}; }
  // Extends the live branches by a token each, in order.
  virtual void take_tokens(std::span<const common::Token>) {}

  // Whether there is one branch of which that is true: then its next step can be scheduled before its token is known.
  virtual bool can_run_ahead() const { return false; }
  // Of such a group. The next token is being computed, as row `row` of a step: a placeholder stands for it until it
  // is known.
  void push_placeholder(int row);
  virtual void resolve_placeholder(common::Token token);
  std::optional<int> placeholder_row() const { return placeholder_row_; }  // none: all tokens are known

 protected:
  // A copy of that live branch, in a forked sequence of its own. It joins the live branches, as the last one, so that
  // its sequence ends with the group whatever is thrown.
  Branch fork(std::size_t parent);
  // Ends the branch's sequence, which frees the blocks that no other branch shares.
  void free(const Branch& branch);
  int text_length(const Branch& branch) const;

  KvCacheManager& manager_;
  SequenceIds& ids_;
  common::Request request_;
  std::vector<Branch> live_;

 private:
  // Tokens that the first branch computes before the others are forked from it: all that the branches have in common,
  // but no branch's last token. Of a single branch: all its tokens.
  int common_prefix_length() const;
  bool has_blocks(const Branch& branch) const;

  int id_;
  std::optional<int> placeholder_row_;
};

// num_samples texts drawn from one prompt, which is computed once.
class ParallelSampling : public SequenceGroup {
 public:
  // Sample i gets the text that a single request with the index request.sample_index + i gets.
  ParallelSampling(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request, int num_samples);

  const std::vector<common::Completion>& completions() const { return completions_; }
  int max_sequences() const override { return static_cast<int>(completions_.size()); }
  void take(std::vector<common::Matrix> logits) override;

  // Not with the prompt's logits, if several samples are drawn from them, and not if log-probabilities are wanted.
  bool takes_tokens() const override { return live_.size() == sample_of_.size() && request_.num_logprobs == 0; }
  Draw draw(SequenceId sequence) const override;
  void take_tokens(std::span<const common::Token> drawn) override;
  bool can_run_ahead() const override { return completions_.size() == 1 && takes_tokens(); }
  void resolve_placeholder(common::Token token) override;

 private:
  // Appends these tokens, one for each live branch, and ends the branches that are finished.
  void accept(std::span<const common::Token> drawn);

  std::vector<common::Completion> completions_;  // by sample
  std::vector<std::size_t> sample_of_;           // by live branch
};

struct BeamOptions {
  int width = 4;
  // Hypotheses are compared by log_probability / length ^ length_penalty: 0 favours short ones, 1 compares the means.
  double length_penalty = 1.0;
};

// A finished text.
struct Hypothesis {
  std::vector<common::Token> tokens;  // without the stop token
  double log_probability = 0.0;       // with it
  double score = 0.0;
  common::FinishReason finish_reason = common::FinishReason::kLength;
};

// Keeps the `width` most probable continuations, finished ones included, and extends each unfinished one by every token
// of the vocabulary. Ties go to the better branch, then to the lower token id. The search ends when all `width` are
// finished, or when no live branch can still beat the best score; those that are live then are dropped.
class BeamSearch : public SequenceGroup {
 public:
  BeamSearch(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request,
             const BeamOptions& options);

  // The finished texts, best first.
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
