// Holds the model, K and V, and computes steps: the one seam between an engine and the hardware. The engine
// decides what a step has, and never asks whether a CPU (cpu_runner.h) or a GPU (gpu_runner.h) computes it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "batch.h"
#include "block_copy.h"
#include "common/base/tensor.h"

namespace stage8 {

// What an engine needs to know about the cache, on a CPU or a GPU.
struct CacheSize {
  int num_blocks = 0;
  int block_size = 0;               // slots in a block
  std::int64_t bytes_per_slot = 0;  // one token's K and V, in all layers and heads
  int num_host_blocks = 0;          // further blocks, for sequences that are swapped out
  std::string reason = {};          // where num_blocks comes from; empty if --slots is given
};

// The result of a batch, by row of its logits: a token or the logits, as the batch asked.
struct StepResult {
  // [num_rows]: drawn as the batch's sampling_rows say, or those with the largest logits. If a logit is NaN or +inf, or
  // all are -inf, the token is -1 on a GPU; on a CPU, enqueue throws InputError.
  std::vector<common::Token> tokens;
  std::vector<common::Matrix> logits;  // [num_rows] of [1, vocab_size], or empty where a token is drawn
};

// A step that has been enqueued. No two steps of a runner have the same.
struct StepId {
  std::uint64_t value = 0;
};

class Runner {
 public:
  virtual ~Runner() = default;

  virtual const CacheSize& cache() const = 0;

  // Carries out the copies in this order; a copy has K and V of all heads, in all layers.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  // Computes the tokens and stores their K and V in their slots. A CPU has finished when this returns, a GPU has begun.
  // If it throws, there is no such step, and no part of it is still running.
  virtual StepId enqueue(const RaggedBatch& batch) = 0;

  // Waits until the step is computed, and returns its result, even if the step after it is still running. Throws if the
  // step has failed or was dropped, and if its result is no longer kept: tokens of the last two steps and logits of the
  // last one are.
  virtual StepResult wait(StepId step) = 0;

  // Whether enqueue() returns before the step is computed, so that the host can prepare the next one meanwhile.
  virtual bool is_asynchronous() const = 0;

  // Does in advance all work that is slow the first time, for chunks of up to max_tokens tokens and steps of up to
  // max_sequences sequences with one token each. Leaves K and V unchanged.
  virtual void warm_up(int /*max_tokens*/, int /*max_sequences*/) {}
};

}  // namespace
