#include "cache_size.h"

#include <algorithm>
#include <iostream>
#include <limits>
#include <set>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "engine.h"

namespace stage8 {

int max_slots_of(const common::Request& request, int num_sequences, int block_size) {
  const auto prompt_length = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t shared = prompt_length / block_size;
  const std::int64_t blocks = (prompt_length + request.max_new_tokens - 1 + block_size - 1) / block_size;
  const std::int64_t slots = (shared + num_sequences * (blocks - shared)) * block_size;
  return static_cast<int>(std::min<std::int64_t>(slots, std::numeric_limits<int>::max() / 2));
}

GpuCacheSize gpu_cache_size(const common::LlamaConfig& config, const EngineOptions& options) {
  GpuCacheSize size;
  if (options.num_slots == 0) {
    const int context =
        options.context_length > 0 ? std::min(options.context_length, config.context_length) : config.context_length;
    size.memory_fraction = options.memory_fraction;
    size.max_slots = std::max<std::int64_t>(std::int64_t{options.max_sequences} * context, options.min_slots);
  }
  return size;
}

int cpu_num_blocks(const KvCacheShape& shape, int min_slots) {
  const int wanted = blocks_needed(min_slots, shape.block_size);
  // As 4-byte floats, which is how the CPU stores them.
  const std::int64_t block_bytes = std::int64_t{2} * shape.num_layers * shape.num_kv_heads * shape.head_dim *
                                   shape.block_size * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t available = common::available_memory_bytes();
  const std::int64_t room = available > 0 ? available / 2 / block_bytes : wanted;
  if (room < 1) {
    throw common::InputError("half of the free memory, " + common::format_bytes(available / 2) +
                             ", has no room for a block of the cache");
  }
  const auto num_blocks = static_cast<int>(std::min<std::int64_t>(wanted, room));
  KvCacheShape chosen = shape;
  chosen.num_blocks = num_blocks;
  tell_cache_size(chosen, num_blocks < wanted ? "half of the free memory"
                          : wanted > blocks_needed(EngineOptions().min_slots, shape.block_size)
                              ? "what the longest request needs"
                              : "the default on a CPU");
  return num_blocks;
}

void tell_cache_size(const KvCacheShape& shape, const std::string& why) {
  static std::set<std::string> said;
  const std::string line = "note: a cache of " + common::format_count(shape.num_slots()) + " slots, " +
                           common::format_bytes(shape.bytes_per_slot() * shape.num_slots()) + ": " + why +
                           " (--slots sets it)\n";
  if (said.insert(line).second) {
    std::cerr << line;
  }
}

}  // namespace
