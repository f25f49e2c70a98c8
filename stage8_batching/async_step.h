// A step that is enqueued before the tokens of the one before are known. On a GPU, the host is always a step ahead:
// while step 2 is computed, it collects the tokens of step 1, schedules step 3 and enqueues it. What step 3 takes up
// from step 2 is not known then; the batch says where it will be found, and the GPU looks there (PendingToken).
//
//   GPU   |  step 1                   |  step 2                      |  step 3                      |
//   host  enqueue 2, wait for 1       |  collect 1, enqueue 3, wait  |  collect 2, enqueue 4, wait  |
#pragma once

#include <vector>

#include "batch.h"
#include "decoding.h"
#include "engine.h"

namespace stage8 {

// What one request has in a step.
struct ScheduledRequest {
  int id = 0;
  SequenceGroup* group = nullptr;        // it may have ended since the step was enqueued
  ParallelSampling* sampling = nullptr;  // the group, if it is one
  ScheduledTokens tokens;

  // Logits that it goes on from, one row a sequence.
  int num_rows() const { return tokens.with_logits ? static_cast<int>(tokens.sequences.size()) : 0; }
};

class InFlightStep {
 public:
  // Builds the batch. The requests are in the cache, with slots reserved for what was scheduled.
  InFlightStep(const KvCacheManager& manager, std::vector<ScheduledRequest> scheduled);

  // Starts the forward pass. previous: the step before, if its tokens have not been collected. Where nothing else is
  // needed but the token of the largest logit of each row, a GPU is not waited for.
  void enqueue(Engine& engine, const InFlightStep* previous);
  // Waits for the tokens. step_age: how many steps have been enqueued since, 0 or 1.
  void collect(Engine& engine, int step_age);

  const std::vector<ScheduledRequest>& requests() const { return requests_; }
  RaggedBatch& batch() { return batch_; }
  bool is_enqueued() const { return is_enqueued_; }
  // Whether every request goes on from its row's largest logit: then tokens() are what is found, by row, else logits().
  bool is_greedy() const { return is_greedy_; }
  const std::vector<common::Token>& tokens() const { return tokens_; }
  const std::vector<common::Matrix>& logits() const { return logits_; }
  double waiting_seconds() const { return waiting_seconds_; }  // for a GPU

 private:
  std::vector<ScheduledRequest> requests_;
  RaggedBatch batch_;
  bool is_enqueued_ = false;
  bool is_greedy_ = true;
  std::vector<common::Matrix> logits_;
  std::vector<common::Token> tokens_;
  double waiting_seconds_ = 0.0;
};

}  // namespace
