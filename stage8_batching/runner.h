// Where the model, K and V are and a step is computed: the one seam between an engine and the hardware. The engine
// decides what a step has, and never asks whether a CPU (cpu_runner.h) or a GPU (gpu_runner.h) computes it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "batch.h"
#include "block_copy.h"
#include "cache_size.h"
#include "common/base/tensor.h"
#include "common/model/llama.h"
#include "engine_options.h"

namespace stage8 {

// What a batch asked for: by row of its logits, one or the other.
struct StepResult {
  // [num_rows]: those that the batch's draws say, or with the largest logits. Where a logit is NaN or +inf, or all are
  // -inf: -1 on a GPU, and on a CPU, enqueue throws CheckError.
  std::vector<common::Token> tokens;
  common::Matrix logits;  // [num_rows, vocab_size]
};

// What bounds the speed of decoding: in each step all weights are read, and K and V.
struct ReadLimit {
  std::int64_t weight_bytes_per_token = 0;
  double bytes_per_second = 0.0;  // of the memory with weights and cache, measured
};

class Runner {
 public:
  virtual ~Runner() = default;

  virtual const CacheSize& cache() const = 0;

  // Carries out the copies in this order: K and V of all heads, in all layers.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  // Computes the tokens and stores their K and V in their slots. A CPU has done so when this returns, a GPU has begun.
  // If it throws, none of it is left running, and the step before counts as the last one.
  virtual void enqueue(const RaggedBatch& batch) = 0;

  // What a batch asked for, once it is computed. step_age 0: the last one; 1: the one before it, even if the last one
  // is still running. All logits are there for the last one only.
  virtual StepResult wait(int step_age) = 0;

  // Whether enqueue() returns before the step is computed, so that the host can prepare the next one meanwhile.
  virtual bool is_asynchronous() const = 0;

  // Does in advance what is slow the first time, for chunks of up to max_tokens tokens and steps of up to max_sequences
  // sequences with one token each. Leaves K and V as they are.
  virtual void warm_up(int /*max_tokens*/, int /*max_sequences*/) {}

  // Measures it. Nothing where it is the host's, as on a CPU.
  virtual std::optional<ReadLimit> read_limit() { return std::nullopt; }
};

// On GPUs or on the CPU: by request or, with Device::kAuto and a note on stderr, on the CPU if there is no GPU or its
// kernels do not support the shape. Says on stderr how large the cache is if the options do not. Throws InputError if
// the options can't be met, or if the memory is too small. The model must outlive the runner.
std::unique_ptr<Runner> make_runner(const common::Llama& model, const EngineOptions& options);

}  // namespace
