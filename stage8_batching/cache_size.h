// How large the cache is unless --slots says it.
//
// On a GPU it takes a share of what is free once weights and workspaces are there, but no more than all sequences of a
// step can fill. On a CPU, where a larger cache makes nothing faster, it has the size of the demonstrations, or what
// the longest request needs; never more than half of the memory that is free.
#pragma once

#include <cstdint>
#include <string>

#include "common/model/generation.h"
#include "gpu_runner.h"
#include "kv_cache.h"

namespace stage8 {

struct EngineOptions;

// The slots that a request needs when it is alone, and its sequences share nothing but the prompt's full blocks. The
// last token of a text is never stored.
int max_slots_of(const common::Request& request, int num_sequences, int block_size);

// What a GPU's runner needs to size the pages itself; nothing if num_slots is given.
GpuCacheSize gpu_cache_size(const common::LlamaConfig& config, const EngineOptions& options);
// On a CPU. Throws InputError if not even a block fits.
int cpu_num_blocks(const KvCacheShape& shape, int min_slots);

// Says once, on stderr, how large the cache is and why.
void tell_cache_size(const KvCacheShape& shape, const std::string& why);

}  // namespace
