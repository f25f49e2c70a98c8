// Several continuations of one prompt: sequences that are forked where their texts diverge, and share all earlier
// blocks. They are scheduled as one group: admitted, computed, preempted and resumed together. The group is the
// request: one object with its sequences, its state and its results, from submit() until it is forgotten.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "batch.h"
#include "common/model/generation.h"
#include "common/serving/generation_request.h"
#include "kv_cache_manager.h"

namespace stage8 {

// Hands out ids for sequences. A returned id is used again, so that ids stay small.
class SequenceIds {
 public:
  SequenceId take() {
    if (unused_.empty()) {
      const std::size_t num_ids = static_cast<std::size_t>(next_) + 1;
      if (unused_.capacity() < num_ids) {
        unused_.reserve(2 * num_ids);  // so that returning an id allocates no memory
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

// One continuation.
struct Branch {
  SequenceId sequence = 0;
  std::vector<common::Token> tokens;  // after the prompt; the cache lacks the last one
  double log_probability = 0.0;       // natural logarithm for all tokens together; kept by a beam search only
};

// A finished text.
struct Hypothesis {
  std::vector<common::Token> tokens;  // without the stop token
  double log_probability = 0.0;       // with the stop token
  double score = 0.0;
  common::FinishReason finish_reason = common::FinishReason::kLength;
  std::optional<common::Token> stop_token = std::nullopt;
};

enum class RequestState {
  kWaiting,   // for its first step, or preempted and to be computed again: it holds no blocks
  kRunning,   // in the batch
  kSwapped,   // waiting, with its blocks in the host's memory
  kFinished,  // for any reason: it holds no blocks, and gets no more tokens
};

// The results of a request so far, and what its engine notes beside them.
struct RequestOutput : common::RequestResult {
  RequestState state = RequestState::kWaiting;
  std::vector<Hypothesis> hypotheses;  // a beam search's finished texts, best first
  int preemptions = 0;

  bool finished() const { return state == RequestState::kFinished; }
};

// Called with every token of every sample. May call the engine's submit(), stop() and forget(). If it throws, only that
// request fails.
using TokenSink = std::function<void(int id, int sample, common::Token token)>;

// The next tokens of some of a group's sequences. A prompt of 6 whose first 4 are computed, of sequence 2, is
// {{2}, {2}, true}: two tokens, and then logits. If only one of them is scheduled, {{2}, {1}, false} is what is left of
// it.
struct ScheduledTokens {
  std::vector<SequenceId> sequences;
  std::vector<int> num_tokens;  // by sequence, at least 1
  // Whether the logits after the last token are needed. If so, several sequences have one token each, all in the same
  // step.
  bool with_logits = false;
};

// What a step has computed for a group, by row: drawn tokens, or logits if the group needs them.
struct GroupResult {
  std::vector<common::Token> tokens;   // negative: no token can be drawn
  std::vector<common::Matrix> logits;  // [1, vocab_size] each
};

// A request: its live branches, its state and its results. Normally the cache lacks one token of every branch, the last
// one. After a preemption it may lack everything; then the branches' common prefix is computed once, in the first
// branch's sequence; the other branches are forked from it, and each computes its own rest.
class SequenceGroup {
 public:
  // Manager and ids must outlive the group. id: the request's id. sink: may be null.
  SequenceGroup(KvCacheManager& manager, SequenceIds& ids, int id, common::Request request, TokenSink sink);
  virtual ~SequenceGroup();
  SequenceGroup(const SequenceGroup&) = delete;
  SequenceGroup& operator=(const SequenceGroup&) = delete;

  int id() const { return id_; }
  const common::Request& request() const { return request_; }
  const RequestOutput& output() const { return output_; }
  RequestOutput& output() { return output_; }  // scheduler and engine write state and times here
  const std::vector<Branch>& live() const { return live_; }
  bool finished() const { return live_.empty(); }
  virtual int max_sequences() const = 0;  // max live branches
  // Max tokens of one sequence in the cache. The last token of a text is never computed.
  int max_tokens() const { return static_cast<int>(request_.prompt.size()) + request_.max_new_tokens - 1; }

  // The live branches' sequences that are in the cache or swapped out.
  std::vector<SequenceId> sequences() const;
  // Whether it is one of these.
  bool has_blocks(SequenceId sequence) const;
  // What a group with blocks computes next. Empty only while the last token is being computed. A single sequence: all
  // that the cache lacks, with logits. Several sequences:
  //   1. until they have been forked: what the first lacks of the common prefix. No logits.
  //   2. while one lacks more than its last token: for each such sequence, what it lacks but for that one. No logits.
  //   3. a token for each, with logits.
  ScheduledTokens tokens_to_compute() const;
  // Starts the first branch's sequence with room for the common prefix. Returns false and changes nothing if these
  // terms leave no room.
  bool allocate(const Admission& admission);
  // Ends all its sequences, in the cache or swapped out: everything has to be computed again.
  void free_blocks();

  // The tokens at the sequence's positions first … first + count - 1.
  std::vector<common::Token> tokens(SequenceId sequence, int first, int count) const;
  // Forks the other branches when the common prefix is complete and they have no sequences yet. The scheduler calls it
  // before it asks what to compute. If memory runs out, the next call forks the rest.
  void fork_branches();
  // Extends the live branches and passes their tokens to the sink. result: a row for each live branch, in order.
  virtual void extend(GroupResult result, double now) = 0;
  // Ends all live branches. The group has finished.
  void end(common::FinishReason reason, std::string error, double now);

  // To be called once for each step that computes tokens of the group. is_last: they are all that the cache lacks.
  // Returns whether they are a chunk: a part of that, or what earlier chunks have left.
  bool begin_chunk(bool is_last) { return std::exchange(lacks_tokens_, !is_last) || !is_last; }

  // How the token after the sequence's last one is drawn, if extend() needs only that token. Nothing if extend() needs
  // the logits.
  virtual std::optional<SamplingRow> sampling_row(SequenceId) const { return std::nullopt; }
  // For a group with one branch, whose next token is being computed as row `row` of a step in flight. Until extend(),
  // the token counts as part of the text, so that the following step can be scheduled. If the group is preempted in
  // between, extend() gets the token all the same, so that it is known when the group is resumed.
  void run_ahead(int row) { pending_row_ = row; }
  std::optional<int> pending_row() const { return pending_row_; }  // none: all tokens are known

 protected:
  // Copies that live branch, with a forked sequence of its own. The copy becomes the last live branch, so that its
  // sequence ends with the group even if something throws.
  Branch fork(std::size_t parent);
  // Ends the branch's sequence, and so frees the blocks that no other branch shares.
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
  // How many tokens the first branch computes before the others are forked from it: all that the branches have in
  // common, but no branch's last token. For a single branch: all its tokens.
  int common_prefix_length() const;
  // tokens_to_compute() of several sequences that have been forked.
  ScheduledTokens tokens_of_branches() const;

  int id_;
  bool lacks_tokens_ = false;  // the last step has computed only a part of what the cache lacked
};

// num_samples texts drawn from one prompt, which is computed once. An ordinary request has one sample.
class ParallelSampling : public SequenceGroup {
 public:
  // Sample i gets the text that a single request with the index request.sample_index + i gets.
  ParallelSampling(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request, int num_samples,
                   TokenSink sink = nullptr);

  int max_sequences() const override { return num_samples_; }
  void extend(GroupResult result, double now) override;
  // Nothing for the prompt's logits if several samples are drawn from them, or if the request needs logits itself.
  std::optional<SamplingRow> sampling_row(SequenceId sequence) const override;

 private:
  // Appends these tokens, one for each live branch, and ends the branches that are finished.
  void accept(std::span<const common::Token> drawn, double now);

  int num_samples_;
  std::vector<std::size_t> sample_of_;  // by live branch: its sample
};

struct BeamOptions {
  int width = 4;
  // Hypotheses are compared by log_probability / length ^ length_penalty. The penalty is 0 or more: 0 compares sums,
  // which favours short texts, and 1 compares means.
  double length_penalty = 1.0;
};

// Keeps the `width` most probable continuations, finished ones included, and extends each unfinished one by every token
// of the vocabulary. Ties go to the better branch, then to the lower token id. The search ends when all are finished.
class BeamSearch : public SequenceGroup {
 public:
  BeamSearch(KvCacheManager& manager, SequenceIds& ids, int id, const common::Request& request,
             const BeamOptions& options);

  // The finished texts, best first.
  const std::vector<Hypothesis>& hypotheses() const { return output_.hypotheses; }
  int max_sequences() const override { return options_.width; }
  void extend(GroupResult result, double now) override;

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
};

}  // namespace
