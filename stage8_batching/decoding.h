// Several continuations of one prompt: sequences that are forked where their texts diverge, and share all blocks
// before. They are scheduled as one group: admitted, computed, preempted and resumed together. The group is the
// request: one object with its sequences, its state and its results, from submit() until it is forgotten.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
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

// A finished text.
struct Hypothesis {
  std::vector<common::Token> tokens;  // without the stop token
  double log_probability = 0.0;       // with it
  double score = 0.0;
  common::FinishReason finish_reason = common::FinishReason::kLength;
};

enum class RequestState {
  kWaiting,   // for its first step, or to be computed again after a preemption: it holds no blocks
  kRunning,   // in the batch
  kSwapped,   // waiting, with its blocks in the host's memory
  kFinished,  // whatever the reason: it holds no blocks, and gets no more tokens
};

// What a request has come to so far. Times are in seconds of the server's clock.
struct RequestOutput {
  RequestState state = RequestState::kWaiting;
  std::optional<common::FinishReason> finish_reason;  // set when it finishes
  std::string error;                                  // why it was rejected or has failed
  // One per sample, from the first token on; of a beam search its hypotheses, best first, once it is complete.
  std::vector<common::Completion> completions;
  std::vector<Hypothesis> hypotheses;  // of a beam search: the finished texts, best first
  double arrival = 0.0;
  double admission = -1.0;          // the first one; negative: never
  std::vector<double> token_times;  // of the first sample's tokens
  double end = 0.0;
  int preemptions = 0;
  bool lacks_tokens = false;  // the last step has computed a part of what the cache lacks

  bool finished() const { return state == RequestState::kFinished; }
};

// Called with every token of every sample. May call the server's submit(), stop() and forget(). If it throws, that
// request fails, and no other.
using TokenSink = std::function<void(int id, int sample, common::Token token)>;

// The next tokens of some of a group's sequences.
struct ScheduledTokens {
  std::vector<SequenceId> sequences;
  std::vector<int> num_tokens;  // by sequence, at least 1
  // Whether the logits after the last token are wanted. If so, several sequences have one token each, all in the same
  // step.
  bool with_logits = false;
};

// What a step has computed for a group, by row: drawn tokens or, if one of the step's groups needs them, logits.
struct GroupResult {
  std::vector<common::Token> tokens;   // negative: no token can be drawn
  std::vector<common::Matrix> logits;  // [1, vocab_size] each
};

// A request: its live branches, its state and its results. Normally the cache lacks one token of every branch, the last
// one. After a preemption it may lack everything; then the prefix that all branches have in common is computed once, in
// the first branch's sequence, the others are forked from it, and each computes its own rest.
class SequenceGroup {
 public:
  // Manager and ids must outlive the group. id: the request's. sink: may be null.
  SequenceGroup(KvCacheManager& manager, SequenceIds& ids, int id, common::Request request, TokenSink sink);
  virtual ~SequenceGroup();
  SequenceGroup(const SequenceGroup&) = delete;
  SequenceGroup& operator=(const SequenceGroup&) = delete;

  int id() const { return id_; }
  const RequestOutput& output() const { return output_; }
  RequestOutput& output() { return output_; }  // scheduler and server note state and times in it
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
  // Extends the live branches and hands their tokens to the sink. result: a row for each of them, in order.
  virtual void take(GroupResult result, double now) = 0;
  // Ends what is live. The group has finished.
  void end(common::FinishReason reason, const std::string& error, double now);

  // How the token after the sequence's last one is drawn, if the token is all that take() needs to know. Otherwise
  // nothing: it needs the logits.
  virtual std::optional<Draw> draw(SequenceId) const { return std::nullopt; }
  // Of a group with one branch: its next token is being computed, as row `row` of a step in flight. Until take(), the
  // token counts as part of the text, so that the step after can be scheduled.
  void run_ahead(int row) { pending_row_ = row; }
  std::optional<int> pending_row() const { return pending_row_; }  // none: all tokens are known

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
  TokenSink sink_;
  std::vector<Branch> live_;
  RequestOutput output_;
  std::optional<int> pending_row_;

 private:
  // Tokens that the first branch computes before the others are forked from it: all that the branches have in common,
  // but no branch's last token. Of a single branch: all its tokens.
  int common_prefix_length() const;
  bool has_blocks(const Branch& branch) const;

  int id_;
};

// num_samples texts drawn from one prompt, which is computed once. One of them is the ordinary request.
class ParallelSampling : public SequenceGroup {
 public:
  // Sample i gets the text that a single request with the index request.sample_index + i gets.
  ParallelSampling(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request, int num_samples,
                   TokenSink sink = nullptr);

  int max_sequences() const override { return num_samples_; }
  void take(GroupResult result, double now) override;
  // None for the prompt's logits if several samples are drawn from them, and none if log-probabilities are wanted.
  std::optional<Draw> draw(SequenceId sequence) const override;

 private:
  // Appends these tokens, one for each live branch, and ends the branches that are finished.
  void accept(std::span<const common::Token> drawn, double now);

  int num_samples_;
  std::vector<std::size_t> sample_of_;  // by live branch
};

struct BeamOptions {
  int width = 4;
  // Hypotheses are compared by log_probability / length ^ length_penalty: 0 favours short ones, 1 compares the means.
  double length_penalty = 1.0;
};

// Keeps the `width` most probable continuations, finished ones included, and extends each unfinished one by every token
// of the vocabulary. Ties go to the better branch, then to the lower token id. The search ends when all `width` are
// finished, or when no live branch can still beat the best score; those that are live then are dropped.
class BeamSearch : public SequenceGroup {
 public:
  BeamSearch(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request,
             const BeamOptions& options);

  // The finished texts, best first.
  const std::vector<Hypothesis>& hypotheses() const { return output_.hypotheses; }
  int max_sequences() const override { return options_.width; }
  void take(GroupResult result, double now) override;

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
};

}  // namespace
