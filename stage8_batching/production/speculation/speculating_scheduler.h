// Decides which drafts a step computes: guesses of how a text goes on (look_up.h). The engine puts them behind the
// text's last token (speculating_engine.h).
//
// Drafts take what a step leaves: each request first gets what it gets without them. They never preempt.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "../../engine_options.h"
#include "../../scheduler.h"
#include "token_cost.h"

namespace stage8 {

// Whether a request's drafts pay: an account in units of a step with one token. Drafts cost what they add to the step,
// and an accepted one saves a step. Without a balance there are no drafts for a while, each time for longer.
class DraftAccount {
 public:
  explicit DraftAccount(const TokenCost& cost);
  // To be called once a step. Whether the request may draft in this one.
  bool may_draft();
  // Ends a pause: drafts would have been right.
  void resume() { pause_ = 0; }
  // Books a step whose tokens are waited for, to be drafted from, with its drafts or without any. The numbers of drafts
  // are those of each of the request's sequences.
  void book(int num_drafts, int num_accepted, int num_sequences = 1);
  // How many drafts to try: a few at first, more once all have been accepted twice in a row.
  int num_drafts(int max_drafts) const;

 private:
  TokenCost cost_;
  int length_;
  bool is_steady_ = false;  // whether all of the last drafts were accepted
  double balance_ = 0.0;
  int pause_ = 0;  // steps
  int next_pause_;
};

class SpeculatingScheduler : public Scheduler {
 public:
  // default_drafts: for requests that do not say how many.
  SpeculatingScheduler(KvCacheManager& manager, const SchedulerOptions& options, bool use_prefix_cache,
                       int default_drafts, const TokenCost& cost);

  // The step's num_tokens has the drafts, too; its groups do not.
  ScheduledStep schedule() override;

  // The sequence's drafts in the step that was scheduled last: as many for all sequences of a group, with slots behind
  // the sequence's own token.
  std::span<const common::Token> drafts_of(SequenceId sequence) const;
  bool has_drafts() const { return !drafts_.empty(); }
  // Whether the next step cannot be scheduled before it is known which tokens the last one has drawn.
  bool is_awaited() const { return is_awaited_; }
  // One more of the group's last drafts has become text, in all its sequences.
  void count_accepted(const SequenceGroup& group);

 protected:
  // Shares no block with a request whose prompt is scored (../scoring/prompt_scores.h).
  bool find_room(SequenceGroup& group, const Admission& admission) override;

  struct Request {
    DraftAccount account;
    bool waits = false;  // whether its last step could have had drafts, so that its tokens are waited for
    int drafts = 0;      // of its last step, for each of its sequences
    int accepted = 0;    // of these
    int num_sequences = 1;
  };
  using Accounts = std::map<int, Request>;  // by id, of requests that have drafted

  std::map<SequenceId, std::vector<common::Token>> drafts_;
  bool is_awaited_ = false;
  Accounts accounts_;  // schedule() books each request's last step

 private:
  // Max drafts of a step for the group.
  int max_drafts(const SequenceGroup& group) const;
  // Whether drafts of the last tokens that are known would have been right.
  bool would_have_been_right(const SequenceGroup& group) const;
  // Looks up drafts of the group's texts, and reserves their slots, if it may have some.
  void add_drafts(const ScheduledGroup& scheduled, ScheduledStep& step);
  // Reserves slots for drafts of all these sequences. Returns how many each can have, up to num_drafts.
  int reserve_drafts(const std::vector<SequenceId>& sequences, int num_drafts);
  // The request's entry, with its last step booked.
  Request& find(const SequenceGroup& group);
  void forget_ended();

  int default_drafts_;
  TokenCost cost_;
  int min_match_;
};

}  // namespace
