#include "common/cuda/model/read_limit.h"

#include <cstddef>
#include <memory>

#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/timing.h"

namespace common {
namespace {

constexpr std::size_t kLargest = std::size_t{1} << 31;   // far more than the L2 cache
constexpr std::size_t kSmallest = std::size_t{1} << 28;  // still more than every one so far

std::unique_ptr<DeviceMemory> large_memory() {
  for (std::size_t bytes = kLargest;; bytes /= 2) {
    try {
      return std::make_unique<DeviceMemory>(bytes);
    } catch (const OutOfDeviceMemory&) {
      if (bytes == kSmallest) {
        throw;
      }
    }
  }
}

}  // namespace

std::int64_t weight_bytes_per_token(const LlamaConfig& config, const GpuTypes& types) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t q_rows = std::int64_t{config.num_heads} * config.head_dim;
  const std::int64_t qkv_rows = q_rows + std::int64_t{2} * config.num_kv_heads * config.head_dim;
  const std::int64_t layer_elements = (qkv_rows + q_rows + 3 * config.feed_forward_size) * hidden;
  const std::int64_t elements = config.vocab_size * hidden + hidden;  // one row of the embedding
  const bool is_float8 = types.weights == WeightType::kFloat8;
  const std::int64_t layer_bytes = layer_elements * (is_float8 ? 1 : bytes_of(types.precision));
  const std::int64_t row_scales = is_float8 ? qkv_rows + 2 * hidden + 2 * config.feed_forward_size : 0;
  const std::int64_t layer_floats = (config.post_norms ? 4 : 2) * hidden + row_scales +
                                    (config.qkv_bias ? qkv_rows : 0) +
                                    (config.qk_norm ? 2 * std::int64_t{config.head_dim} : 0);
  const std::int64_t floats = config.num_layers * layer_floats + hidden;
  return config.num_layers * layer_bytes + elements * bytes_of(types.precision) +
         floats * static_cast<std::int64_t>(sizeof(float));
}

ReadLimit device_read_limit(const LlamaConfig& config, const GpuTypes& types, std::int64_t bytes_per_slot,
                            int num_gpus) {
  const std::unique_ptr<DeviceMemory> memory = large_memory();
  CUDA_CHECK(cudaMemset(memory->data(), 0, memory->bytes()));
  const double bytes_per_second = 1e9 * read_ceiling(Stream(), memory->data(), memory->bytes());
  return {weight_bytes_per_token(config, types), bytes_per_slot, num_gpus * bytes_per_second};
}

}  // namespace common
