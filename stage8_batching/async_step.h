// A step that is enqueued before the tokens of the previous step are known. On a GPU, the host is always a step ahead:
// while step 2 is computed, it collects the tokens of step 1, schedules step 3 and enqueues it. The tokens that step 3
// needs from step 2 are not known then: the batch says where step 2 will leave them, and the GPU reads them there
// (PendingToken).
//
//   GPU   |  step 1                   |  step 2                      |  step 3                      |
//   host  enqueue 2, wait for 1       |  collect 1, enqueue 3, wait  |  collect 2, enqueue 4, wait  |
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "batch.h"
#include "engine.h"
#include "scheduler.h"

namespace stage8 {

class InFlightStep {
 public:
  // Builds the batch. Slots must be reserved for all scheduled tokens.
  InFlightStep(const KvCacheManager& manager, std::vector<ScheduledGroup> groups);

  // Starts the forward pass. previous: the step before, if its tokens have not been collected, else null. Waits for a
  // GPU only if a group needs logits, not just the tokens that are drawn from them.
  void enqueue(Engine& engine, const InFlightStep* previous);
  // Waits for the tokens. step_age: how many steps have been enqueued since, 0 or 1.
  void collect(Engine& engine, int step_age);

  const std::vector<ScheduledGroup>& groups() const { return groups_; }
  RaggedBatch& batch() { return batch_; }
  bool is_enqueued() const { return is_enqueued_; }
  // Whether another step can be scheduled before these tokens are known: every group goes on from one drawn token.
  bool can_run_ahead() const { return draws_tokens_ && are_lone_; }
  // Once it is collected: the tokens by row, if they are drawn.
  const std::vector<common::Token>& tokens() const { return tokens_; }
  // Once it is collected: what a group gets, whose rows are num_rows from `first` on.
  GroupResult result(int first, int num_rows) const;
  double waiting_seconds() const { return waiting_seconds_; }  // for a GPU

 private:
  // On the CPU, from a row of logits.
  common::Token draw(std::span<const float> logits, std::size_t row) const;

  std::vector<ScheduledGroup> groups_;
  RaggedBatch batch_;
  bool is_enqueued_ = false;
  bool draws_tokens_ = true;  // every group goes on from the tokens that are drawn from its rows
  bool are_lone_ = true;      // every group with rows has one sequence at most
  std::vector<common::Matrix> logits_;
  std::vector<common::Token> tokens_;
  double waiting_seconds_ = 0.0;
};

}  // namespace
