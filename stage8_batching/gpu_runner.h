// The model and its K/V on a GPU: what the engine does with the model and the cache where there is none. Nothing of
// CUDA is seen here; kernels/cuda_runner.cpp has the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "batch.h"
#include "common/model/llama.h"
#include "common/tensor.h"
#include "kv_cache.h"
#include "kv_cache_manager.h"

namespace stage8 {

enum class Device { kAuto, kCpu, kGpu };
// Of weights, activations, K and V. Sums are float32 in both. float32 gives the text of all other stages; bfloat16
// reads half the bytes.
enum class Precision { kFloat32, kBFloat16 };

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, and else the CPU, with a word about it
  Precision precision = Precision::kFloat32;
};

class GpuRunner {
 public:
  virtual ~GpuRunner() = default;

  // Carries the copies out, in their order: K and V of all heads, in all layers.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  // Computes a sequence's next tokens, which stand at these positions, and keeps their K and V in these slots.
  // Ordered, not waited for.
  virtual void forward(std::span<const common::Token> tokens, std::span<const int> positions,
                       std::span<const int> slot_mapping, std::span<const int> block_table) = 0;

  // After the last token of the last forward pass: all logits, [1, vocab_size], or only where the largest is. Waits.
  virtual common::Matrix logits() = 0;
  virtual common::Token likeliest() = 0;

  // The same for a batch: sequence by sequence, as long as no runner takes it whole. Logits: of the rows that it
  // wanted.
  virtual void forward_batch(const RaggedBatch& batch);
  virtual common::Matrix batch_logits();

  // K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  virtual common::Matrix keys(int layer, std::span<const int> slots) = 0;
  virtual common::Matrix values(int layer, std::span<const int> slots) = 0;

  virtual std::int64_t weight_bytes_per_token() const = 0;
  virtual double read_bandwidth() = 0;  // bytes a second that the GPU's memory can be read at, measured

 private:
  std::vector<common::Matrix> batch_logits_;
};

// Null if all is to be done on the CPU: asked for; or with kAuto, and a word on stderr, if there is no GPU or its
// kernels do not take the shape. Throws InputError if what is asked for can't be had, and if the GPU's memory is too
// small. chunk_size: the most tokens of one forward pass.
std::unique_ptr<GpuRunner> make_gpu_runner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, int chunk_size);

}  // namespace
