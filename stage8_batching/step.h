// A step, from what is scheduled to its results. Whatever fails, it holds or it never was: what may throw comes first,
// and nothing is taken for computed before it is.
//
//   prepare   builds the batch and enqueues it: the constructor, and then enqueue(). May throw: then there is no step.
//   confirm   counts the step's tokens, so that the next one can be scheduled. Cannot throw.
//   collect   waits for the results, and publishes the blocks that are full now: their K and V are there only now.
//
// A step may be enqueued before the tokens of the step before are known. On a GPU, the host is always a step ahead:
// while step 2 is computed, it collects the tokens of step 1, schedules step 3 and enqueues it. Step 3 needs tokens of
// step 2 that are not known then: the batch says where step 2 will store them, and the GPU reads them there
// (PendingToken).
//
//   GPU   |  step 1                   |  step 2                      |  step 3                      |
//   host  enqueue 2, wait for 1       |  collect 1, enqueue 3, wait  |  collect 2, enqueue 4, wait  |
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "batch.h"
#include "kv_cache_manager.h"
#include "runner.h"
#include "scheduler.h"

namespace stage8 {

class Step {
 public:
  // Builds the batch, in which sequences with one token come first; groups() are in the order of their rows of logits.
  // Slots must be reserved for all scheduled tokens.
  Step(const KvCacheManager& manager, std::vector<ScheduledGroup> groups);

  // The runner computes the batch, with this many rows of logits: the step's own rows, or further ones behind them.
  // runs_ahead: another step may be scheduled before the results of this one are collected.
  void enqueued(StepId id, std::size_t num_rows, bool runs_ahead);

  // Counts the tokens of all requests that have not ended meanwhile. drawn: what the step before has drawn, by row of
  // its logits; empty if it has failed, and with it all requests that wait for one of its tokens.
  void confirm(KvCacheManager& manager, std::span<const common::Token> drawn) noexcept;

  // Waits for the result. If it throws, the step has none.
  void collect(Runner& runner);
  // After collect(): publishes full blocks of requests that have not ended.
  void publish(KvCacheManager& manager) const;

  const std::vector<ScheduledGroup>& groups() const { return groups_; }
  const RaggedBatch& batch() const { return batch_; }
  // Whether another step can be scheduled before these tokens are known: every group continues from one drawn token.
  bool can_run_ahead() const { return can_run_ahead_; }
  bool runs_ahead() const { return runs_ahead_; }
  // After collect(): the tokens by row, if the step draws tokens.
  std::vector<common::Token>& tokens() { return tokens_; }
  // After collect(): the result of the group whose num_rows rows begin at `first`.
  GroupResult result(int first, int num_rows) const;
  double waiting_seconds() const { return waiting_seconds_; }  // for steps that are computed while the host works

 private:
  // Adds the group's sequences that have a single token, or those that have more.
  void add(const KvCacheManager& manager, const ScheduledGroup& scheduled, bool single);

  std::vector<ScheduledGroup> groups_;
  RaggedBatch batch_;
  std::vector<const SequenceGroup*> owners_;  // by sequence of the batch
  bool can_run_ahead_ = true;
  bool runs_ahead_ = false;
  StepId id_;
  std::size_t num_rows_ = 0;  // of logits, that the runner computes
  std::vector<common::Matrix> logits_;
  std::vector<common::Token> tokens_;
  double waiting_seconds_ = 0.0;
};

}  // namespace
