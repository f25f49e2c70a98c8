// The model and its K/V on a GPU: what the engine does with the model and the cache where there is none. Nothing of
// CUDA is seen here; kernels/cuda_runner.cpp has the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/base/tensor.h"
#include "common/model/llama.h"
#include "kv_cache.h"
#include "kv_cache_manager.h"

namespace stage7 {

enum class Device { kAuto, kCpu, kGpu };
// Of weights, activations, K and V. Sums are float32 in both. float32 gives the text of all other stages; bfloat16
// reads half the bytes.
enum class Precision { kFloat32, kBFloat16 };

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, and else the CPU, with a word about it
  Precision precision = Precision::kFloat32;
};

// The next tokens of some sequences, one sequence after the other; here, of a single one.
struct GpuStep {
  std::span<const common::Token> tokens;  // [num_tokens]; -1 - i: what likeliest(0) has for row i before this step
  std::span<const int> positions;         // [num_tokens]
  std::span<const int> slot_mapping;      // [num_tokens]
  std::span<const int> query_starts;      // [num_sequences + 1]: where each one's tokens begin
  std::span<const int> context_lengths;   // [num_sequences], the new tokens included
  std::span<const int> block_tables;      // one after the other
  std::span<const int> table_starts;      // [num_sequences + 1]: where each one's table begins
  std::span<const int> logits_rows;       // of the tokens whose logits are wanted
};

class GpuRunner {
 public:
  virtual ~GpuRunner() = default;

  // Carries the copies out, in their order: K and V of all heads, in all layers.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  // Computes the tokens and keeps their K and V in their slots. Ordered, not waited for.
  virtual void forward(const GpuStep& step) = 0;

  // Of the rows that the last step wanted: all logits, [num_rows, vocab_size]. Waits.
  virtual common::Matrix logits() = 0;
  // Only where each row's largest is; of the last step, or with steps_ago 1 of the one before, while the last one may
  // still be computed. -1 if a logit is NaN or all are -inf. Waits.
  virtual std::vector<common::Token> likeliest(int steps_ago) = 0;

  // K or V of all heads in these slots, read back: [slots.size(), num_kv_heads * head_dim].
  virtual common::Matrix keys(int layer, std::span<const int> slots) = 0;
  virtual common::Matrix values(int layer, std::span<const int> slots) = 0;

  virtual std::int64_t weight_bytes_per_token() const = 0;
  virtual double read_bandwidth() = 0;  // bytes a second that the GPU's memory can be read at, measured
};

// Null if all is to be done on the CPU: asked for; or with kAuto, and a word on stderr, if there is no GPU or its
// kernels do not take the shape. Throws InputError if what is asked for can't be had, and if the GPU's memory is too
// small. chunk_size: the most tokens of one forward pass.
std::unique_ptr<GpuRunner> make_gpu_runner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, int chunk_size);

}  // namespace
