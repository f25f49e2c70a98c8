// The model and its K and V on a GPU: what the engine uses in place of the model and the cache. This header is free of
// CUDA; kernels/cuda_runner.cpp implements it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "batch.h"
#include "block_copy.h"
#include "common/base/tensor.h"
#include "common/cuda/model/precision.h"
#include "common/cuda/several/all_reduce.h"
#include "common/model/llama.h"
#include "kv_cache.h"

namespace stage8 {

enum class Device { kAuto, kCpu, kGpu };
// Of weights, activations, K and V. Sums are float32 either way. float32 gives the text of all other stages; bfloat16
// reads half the bytes.
using common::AllReduce;
using common::Precision;
// Of the weights of the layers: that of the precision, or float8 (e4m3 with a scale for each row), likewise.
using common::WeightType;
// Of K and V in the pages: that of the precision, or float8 (e4m3 with a scale for each token and head), which goes
// with bfloat16.
enum class KvCacheType { kAuto, kFloat8 };

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, else the CPU, with a note on stderr
  Precision precision = Precision::kFloat32;
  KvCacheType kv_cache = KvCacheType::kAuto;
  WeightType weights = WeightType::kAuto;
  int tensor_parallel = 1;  // how many GPUs compute the model together, each with a part of every matrix
  AllReduce all_reduce = AllReduce::kNccl;
};

// For a runner that is to find out itself how many blocks there is room for.
struct GpuCacheSize {
  double memory_fraction = 0.0;  // of what weights and workspaces leave free
  std::int64_t max_slots = 0;
};

class GpuRunner {
 public:
  virtual ~GpuRunner() = default;

  // Carries out the copies in this order: K and V of all heads, in all layers.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  // Computes the tokens and stores their K and V in their slots. Returns once the work is enqueued. If it throws, none
  // of it is left running, and the step before counts as the last one.
  virtual void forward(const RaggedBatch& step) = 0;

  // All logits of the last step's logits_rows: [num_rows, vocab_size]. Waits for the step.
  virtual common::Matrix logits() = 0;
  // The token that the step's draws say, of each row, or the one with the largest logit; -1 if a logit is NaN or +inf,
  // or all are -inf. step_age 0: of the last step; 1: of the one before it, even if the last one is still running.
  // Waits for that step.
  virtual std::vector<common::Token> drawn_tokens(int step_age) = 0;

  // Does in advance what is slow the first time: computes a chunk of max_tokens tokens, and records the steps of up to
  // max_sequences sequences with one token each. Leaves K and V as they are.
  virtual void warm_up(int max_tokens, int max_sequences) = 0;
  // Steps recorded so far: after warming up, none of up to max_sequences sequences is recorded any more.
  virtual int num_recorded_steps() const = 0;

  // K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  virtual common::Matrix keys(int layer, std::span<const int> slots) = 0;
  virtual common::Matrix values(int layer, std::span<const int> slots) = 0;

  virtual int num_blocks() const = 0;  // in the cache
  virtual std::int64_t weight_bytes_per_token() const = 0;
  virtual double read_bandwidth() = 0;  // of the GPU's memory, measured: bytes per second
};

// Returns null if all is to be computed on the CPU: by request or, with kAuto and a note on stderr, if there is no GPU
// or its kernels do not support the shape. Throws InputError if the options can't be met, or if the GPU's memory is too
// small, or the host's for the blocks that are swapped out. chunk_size: max tokens in one forward pass. max_sequences:
// max sequences in it. size: if the shape has no blocks.
std::unique_ptr<GpuRunner> make_gpu_runner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, int chunk_size, int max_sequences,
                                           const GpuCacheSize& size = {});

}  // namespace
