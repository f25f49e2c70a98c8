// How large the cache is unless --slots says it.
//
// On a GPU it takes a share of what is free once weights and workspaces are there, but no more than all sequences of a
// step can fill. On a CPU, where a larger cache makes nothing faster, it has the size of the demonstrations, or what
// the longest request needs; never more than half of the memory that is free.
#pragma once

#include <cstdint>
#include <string>

#include "common/model/generation.h"
#include "common/model/llama.h"
#include "engine_options.h"

namespace stage8 {

// What an engine needs to know of the cache, wherever it is.
struct CacheSize {
  int num_blocks = 0;
  int block_size = 0;               // slots in a block
  std::int64_t bytes_per_slot = 0;  // of one token's K and V, in all layers and heads
  int num_host_blocks = 0;          // further blocks, for what is swapped out
  std::string reason = {};          // why there are so many blocks; empty if --slots says it

  int num_slots() const { return num_blocks * block_size; }
};

// The slots that a request needs when it is alone, and its sequences share nothing but the prompt's full blocks. The
// last token of a text is never stored.
int max_slots_of(const common::Request& request, int num_sequences, int block_size);

// What a cache on a GPU may take if nothing says how many slots it has.
struct MemoryShare {
  double memory_fraction = 0.0;  // of what weights and workspaces leave free
  std::int64_t max_slots = 0;
};
MemoryShare memory_share(const common::LlamaConfig& config, const EngineOptions& options);

// Set num_blocks and the reason; the rest is given. Throw InputError if not even a block fits.
void fit_into_host(CacheSize& size, int min_slots);
// free_bytes: on the GPU that has least of it.
void fit_into_gpus(CacheSize& size, const MemoryShare& share, std::int64_t free_bytes, int num_gpus);

// A line that says how large the cache is and why.
std::string note(const CacheSize& size);

}  // namespace
