// How large the cache is if --slots is absent.
//
// On a GPU it is a share of the memory that weights and workspaces leave free, but no more than all sequences of a step
// can fill. On a CPU, where a larger cache makes nothing faster, it has the size of the demonstrations, or what the
// longest request needs; never more than half of the free memory.
#pragma once

#include <cstdint>
#include <string>

#include "common/model/generation.h"
#include "common/model/llama.h"
#include "engine_options.h"

namespace stage8 {

// What an engine needs to know about the cache, on a CPU or a GPU.
struct CacheSize {
  int num_blocks = 0;
  int block_size = 0;               // slots in a block
  std::int64_t bytes_per_slot = 0;  // one token's K and V, in all layers and heads
  int num_host_blocks = 0;          // further blocks, for sequences that are swapped out
  std::string reason = {};          // where num_blocks comes from; empty if --slots is given

  int num_slots() const { return num_blocks * block_size; }
};

// The slots that a request needs when it runs alone and its sequences share only the prompt's full blocks. The last
// token of a text is never stored.
int max_slots_of(const common::Request& request, int num_sequences, int block_size);

// How much memory a cache on a GPU may use if the number of slots is not given.
struct MemoryShare {
  double memory_fraction = 0.0;  // of the memory that weights and workspaces leave free
  std::int64_t max_slots = 0;
};
MemoryShare memory_share(const common::LlamaConfig& config, const EngineOptions& options);

// Both set num_blocks and the reason; the rest of `size` is given. Both throw InputError if not even one block fits.
void fit_into_host(CacheSize& size, int min_slots);
// free_bytes: on the GPU with the least free memory.
void fit_into_gpus(CacheSize& size, const MemoryShare& share, std::int64_t free_bytes, int num_gpus);

// One line: how large the cache is, and why.
std::string note(const CacheSize& size);

}  // namespace
