// How many blocks a cache gets if --slots is absent.
//
// On a GPU they take a share of the memory that weights and workspaces leave free, but are no more than all sequences
// of a step can fill. On a CPU, where a larger cache makes nothing faster, they hold the default, or the longest
// request if it needs more; they never take more than half of the free memory.
#pragma once

#include <cstdint>
#include <string>

namespace common {

struct CacheRoom {
  int num_blocks = 0;
  std::string reason;  // why so many
};

// How much memory a cache on a GPU may use.
struct MemoryShare {
  double memory_fraction = 0.0;  // of the memory that weights and workspaces leave free
  std::int64_t max_slots = 0;    // what the sequences of a step can fill
};

// Both throw InputError if not even one block fits. block_size: slots in a block. bytes_per_slot: one token's K and V,
// in all layers and heads. min_slots: what is needed, at least default_slots.
CacheRoom room_in_host(int min_slots, int default_slots, int block_size, std::int64_t bytes_per_slot);
// free_bytes: on the GPU with the least free memory.
CacheRoom room_on_gpus(const MemoryShare& share, std::int64_t free_bytes, int num_gpus, int block_size,
                       std::int64_t bytes_per_slot);

// One line: how large the cache is, and why.
std::string cache_note(std::int64_t num_slots, std::int64_t bytes_per_slot, const std::string& reason);

}  // namespace common
