// The model and its K and V on a GPU: what the engine uses in place of the model and the cache. This header is free of
// CUDA; kernels/cuda_runner.cpp implements it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "block_copy.h"
#include "common/base/tensor.h"
#include "common/cuda/model/precision.h"
#include "common/model/llama.h"
#include "kv_cache.h"

namespace stage7 {

enum class Device { kAuto, kCpu, kGpu };
// Of weights, activations, K and V. Sums are float32 either way. float32 gives the text of all other stages; bfloat16
// reads half the bytes.
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
};

// The next tokens of a sequence.
struct GpuStep {
  std::span<const common::Token> tokens;  // [num_tokens]
  std::span<const int> positions;         // [num_tokens]
  std::span<const int> slot_mapping;      // [num_tokens]
  std::span<const int> block_table;       // ceil(context_length / block_size) entries, or more
  int context_length = 0;                 // the new tokens included
};

class GpuRunner {
 public:
  virtual ~GpuRunner() = default;

  // Carries out the copies in this order: K and V of all heads, in all layers.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  // Computes the tokens and stores their K and V in their slots. Returns once the work is enqueued. If it throws, none
  // of it is left running.
  virtual void forward(const GpuStep& step) = 0;

  // All logits after the last token of the last step: [1, vocab_size]. Waits for the step.
  virtual common::Matrix logits() = 0;
  // The token with the largest of them; -1 if one is NaN or all are -inf. Waits for the step.
  virtual common::Token argmax_token() = 0;

  // K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  virtual common::Matrix keys(int layer, std::span<const int> slots) = 0;
  virtual common::Matrix values(int layer, std::span<const int> slots) = 0;

  virtual std::int64_t weight_bytes_per_token() const = 0;
  virtual double read_bandwidth() = 0;  // of the GPU's memory, measured: bytes per second
};

// Returns null if all is to be computed on the CPU: by request or, with kAuto and a note on stderr, if there is no GPU
// or its kernels do not support the shape. Throws InputError if the options can't be met, or if the GPU's memory is too
// small. chunk_size: max tokens in one forward pass.
std::unique_ptr<GpuRunner> make_gpu_runner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, int chunk_size);

}  // namespace
