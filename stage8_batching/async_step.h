// A step that is enqueued before the tokens of the previous step are known. On a GPU, the host is always a step ahead:
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
#include "runner.h"
#include "scheduler.h"

namespace stage8 {

class InFlightStep {
 public:
  // Builds the batch, in which sequences with one token come first; groups() are in the order of their rows of logits.
  // Slots must be reserved for all scheduled tokens.
  InFlightStep(const KvCacheManager& manager, std::vector<ScheduledGroup> groups);

  // Waits for the result of the enqueued batch. step_age: how many batches have been enqueued since, 0 or 1.
  void collect(Runner& runner, int step_age);

  const std::vector<ScheduledGroup>& groups() const { return groups_; }
  RaggedBatch& batch() { return batch_; }
  // Whether another step can be scheduled before these tokens are known: every group continues from one drawn token.
  bool can_run_ahead() const { return can_run_ahead_; }
  // After collect(): the tokens by row, if the step draws tokens.
  const std::vector<common::Token>& tokens() const { return tokens_; }
  // After collect(): the result of the group whose num_rows rows begin at `first`.
  GroupResult result(int first, int num_rows) const;
  double waiting_seconds() const { return waiting_seconds_; }  // for steps that are computed while the host works

 private:
  // Adds the group's sequences that have a single token, or those that have more.
  void add(const KvCacheManager& manager, const ScheduledGroup& scheduled, bool single);

  std::vector<ScheduledGroup> groups_;
  RaggedBatch batch_;
  bool can_run_ahead_ = true;
  std::vector<common::Matrix> logits_;
  std::vector<common::Token> tokens_;
  double waiting_seconds_ = 0.0;
};

}  // namespace
