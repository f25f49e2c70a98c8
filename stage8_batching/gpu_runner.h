// The model and its K/V on a GPU: what the engine does with the model and the cache where there is none. Nothing of
// CUDA is seen here; kernels/cuda_runner.cpp has the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "batch.h"
#include "common/base/tensor.h"
#include "common/cuda/precision.h"
#include "common/model/llama.h"
#include "kv_cache.h"
#include "kv_cache_manager.h"

namespace stage8 {

enum class Device { kAuto, kCpu, kGpu };
// Of weights, activations, K and V. Sums are float32 in both. float32 gives the text of all other stages; bfloat16
// reads half the bytes.
using common::Precision;

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, and else the CPU, with a note about it
  Precision precision = Precision::kFloat32;
};

// The next tokens of some sequences, one sequence after the other.
struct GpuStep {
  std::span<const common::Token> tokens;         // [num_tokens]
  std::span<const PendingToken> pending_tokens;  // the tokens that are not known yet
  std::span<const int> positions;                // [num_tokens]
  std::span<const int> slot_mapping;             // [num_tokens]; -1: K and V are kept nowhere
  std::span<const int> query_starts;             // [num_sequences + 1]: where each one's tokens begin
  std::span<const int> context_lengths;          // [num_sequences], the new tokens included
  std::span<const int> block_tables;             // one after the other
  std::span<const int> table_starts;             // [num_sequences + 1]: where each one's table begins
  std::span<const int> logits_rows;              // of the tokens whose logits are wanted
};

class GpuRunner {
 public:
  virtual ~GpuRunner() = default;

  // Carries the copies out, in order: K and V of all heads, in all layers.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  // Computes the tokens and keeps their K and V in their slots. Enqueued, not waited for. If it throws, nothing is
  // under way any more, and the step before counts as the last one.
  virtual void forward(const GpuStep& step) = 0;

  // Of the rows that the last step wanted: all logits, [num_rows, vocab_size]. Waits.
  virtual common::Matrix logits() = 0;
  // Only which of each row's logits is the largest; -1 if one is NaN or all are -inf. step_age 0: of the last step; 1:
  // of the one before it, while the last one may still be computed. Waits.
  virtual std::vector<common::Token> argmax_tokens(int step_age) = 0;

  // Does once what is slow the first time: computes a chunk of max_tokens tokens, and records the steps of up to
  // max_sequences sequences with one token each. K and V are left as they were.
  virtual void warm_up(int max_tokens, int max_sequences) = 0;

  // K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  virtual common::Matrix keys(int layer, std::span<const int> slots) = 0;
  virtual common::Matrix values(int layer, std::span<const int> slots) = 0;

  virtual std::int64_t weight_bytes_per_token() const = 0;
  virtual double read_bandwidth() = 0;  // bytes a second that the GPU's memory can be read at, measured
};

// Null if all is to be done on the CPU: because that was asked for; or with kAuto, and a note on stderr, if there is no
// GPU or its kernels do not take the shape. Throws InputError if what is asked for can't be had, and if the GPU's
// memory is too small, or the host's for the blocks that are swapped out. chunk_size: the largest number of tokens in
// one forward pass.
std::unique_ptr<GpuRunner> make_gpu_runner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, int chunk_size);

}  // namespace
