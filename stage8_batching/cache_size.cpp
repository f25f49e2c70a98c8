#include "cache_size.h"

#include <algorithm>
#include <limits>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "kv_cache_manager.h"

namespace stage8 {

int max_slots_of(const common::Request& request, int num_sequences, int block_size) {
  const auto prompt_length = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t shared = prompt_length / block_size;
  const std::int64_t blocks = (prompt_length + request.max_new_tokens - 1 + block_size - 1) / block_size;
  const std::int64_t slots = (shared + num_sequences * (blocks - shared)) * block_size;
  return static_cast<int>(std::min<std::int64_t>(slots, std::numeric_limits<int>::max() / 2));
}

MemoryShare memory_share(const common::LlamaConfig& config, const EngineOptions& options) {
  const int context =
      options.context_length > 0 ? std::min(options.context_length, config.context_length) : config.context_length;
  return {
      .memory_fraction = options.memory_fraction,
      .max_slots = std::max<std::int64_t>(std::int64_t{options.scheduler.max_sequences} * context, options.min_slots)};
}

void fit_into_host(CacheSize& size, int min_slots) {
  const int wanted = blocks_needed(min_slots, size.block_size);
  const std::int64_t available = common::available_memory_bytes();
  const std::int64_t room = available > 0 ? available / 2 / (size.bytes_per_slot * size.block_size) : wanted;
  if (room < 1) {
    throw common::InputError("half of the free memory, " + common::format_bytes(available / 2) +
                             ", has no room for a block of the cache");
  }
  size.num_blocks = static_cast<int>(std::min<std::int64_t>(wanted, room));
  size.reason = size.num_blocks < wanted                                             ? "half of the free memory"
                : wanted > blocks_needed(EngineOptions().min_slots, size.block_size) ? "what the longest request needs"
                                                                                     : "the default on a CPU";
}

void fit_into_gpus(CacheSize& size, const MemoryShare& share, std::int64_t free_bytes, int num_gpus) {
  const auto room = static_cast<std::int64_t>(share.memory_fraction * static_cast<double>(free_bytes)) /
                    (size.bytes_per_slot * size.block_size);
  // Slot numbers are ints.
  const std::int64_t most = std::min<std::int64_t>((share.max_slots + size.block_size - 1) / size.block_size,
                                                   std::numeric_limits<int>::max() / size.block_size);
  if (room < 1) {
    throw common::InputError("beside the model the GPU has " + common::format_bytes(free_bytes) +
                             " free, of which --memory-fraction leaves no block of K and V");
  }
  size.num_blocks = static_cast<int>(std::min(room, most));
  if (room > most) {
    size.reason = "all that the sequences of a step can fill";
  } else if (num_gpus > 1) {
    size.reason = common::format("%g of what is free beside the model on the fullest of %d GPUs", share.memory_fraction,
                                 num_gpus);
  } else {
    size.reason = common::format("%g of the ", share.memory_fraction) + common::format_bytes(free_bytes) +
                  " that the GPU has free beside the model";
  }
}

std::string note(const CacheSize& size) {
  return "a cache of " + common::format_count(size.num_slots()) + " slots, " +
         common::format_bytes(size.bytes_per_slot * size.num_slots()) + ": " + size.reason + " (--slots sets it)";
}

}  // namespace
