// The blocks of a cache and the requests that own them, at one moment.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/tensor.h"

namespace common {

// Counted in slots, as in a stage's cache manager.
struct SlotUsage {
  int total = 0;
  int reserved = 0;  // by sequences; a shared slot counts once
  int used = 0;      // of those, holding a token
  int cached = 0;    // owned by no sequence, but holding tokens that may be found again
};

// What a prefix cache has done since it was made.
struct PrefixFigures {
  std::int64_t lookups = 0;       // sequences that were looked up
  std::int64_t hits = 0;          // that found at least one block
  std::int64_t tokens_saved = 0;  // found in the cache, and not computed
  std::int64_t evictions = 0;     // cached blocks whose contents were given up
};

// The spans in it belong to the cache: they are valid until it changes.
struct PoolSnapshot {
  struct Sequence {
    std::span<const int> block_table;
    int length = 0;  // tokens in the cache
  };
  struct Owner {
    int id = 0;                            // the request's
    std::vector<Sequence> sequences = {};  // those in the cache
    bool is_swapped = false;               // whether it has others, in the host's memory
    std::vector<std::span<const Token>> texts = {};
  };

  int num_blocks = 0;
  int block_size = 0;
  std::vector<Owner> running = {};
  std::vector<Owner> waiting = {};  // in the order of the queue
  std::vector<int> cached_blocks = {};
};

// What is in a block.
struct BlockState {
  int owner = -1;      // the first request that owns it
  int num_owners = 0;  // requests
  int num_tables = 0;  // block tables that contain it
  int num_tokens = 0;  // in its slots
  bool is_cached = false;
};

// Of the first max_blocks blocks of the pool, or of all if it has fewer.
std::vector<BlockState> block_states(const PoolSnapshot& pool, int max_blocks);

}  // namespace common
