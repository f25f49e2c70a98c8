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
#include "common/base/tensor.h"
#include "common/model/llama.h"
#include "engine_options.h"

namespace stage7 {

// What an engine needs to know of the cache, wherever it is.
struct CacheSize {
  int num_blocks = 0;
  int block_size = 0;               // slots in a block
  std::int64_t bytes_per_slot = 0;  // of one token's K and V, in all layers and heads
};

// What a batch asked for: by row of its logits, one or the other.
struct StepResult {
  // [num_rows]: those with the largest logits. Where a logit is NaN or all are -inf: -1 on a GPU, and on a CPU, enqueue
  // throws CheckError.
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
  // If it throws, none of it is left running.
  virtual void enqueue(const RaggedBatch& batch) = 0;

  // What the last batch asked for, once it is computed.
  virtual StepResult wait() = 0;

  // Measures it. Nothing where it is the host's, as on a CPU.
  virtual std::optional<ReadLimit> read_limit() { return std::nullopt; }
};

// On a GPU or on the CPU: by request or, with Device::kAuto and a note on stderr, on the CPU if there is no GPU or its
// kernels do not support the shape. Throws InputError if the options can't be met, or if the memory is too small. The
// model must outlive the runner.
std::unique_ptr<Runner> make_runner(const common::Llama& model, const EngineOptions& options);

}  // namespace
