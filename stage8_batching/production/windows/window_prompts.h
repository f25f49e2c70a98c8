// Prompts of models whose layers all have the same window: of the cached blocks of their texts, they need only those
// that the first query sees.
//
//   block_size 4, window 6, a prompt of 18 tokens, of which 16 were computed before, in blocks 7, 1, 3 and 5:
//   position 16 sees 11 … 16, in blocks 3 and 5
//   7 and 1 have been evicted: found are [-, -, 3, 5], and the sequence begins with [2, 2, 3, 5], where 2 stands in
//
// With a second tier of the prefix cache, they may be there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../../kv_cache_manager.h"
#include "../host_cache/host_cache.h"
#include "evicted_texts.h"

namespace stage8 {

// With which blocks a sequence can begin.
struct FoundBlocks {
  static constexpr int kOnHost = -2;

  // -1: none of its own, as no query sees it. If that is only one, it is there if the pool has it: a block that stands
  // in for it would cost as much. kOnHost: it is to be brought back.
  std::vector<int> blocks;
  std::vector<int> host_blocks;  // where these are
  int before = -1;               // in front of the first one that is seen: the pool's block, if it has one
  std::size_t num_first = 0;     // so many blocks of its text are cached from the first one on
};

// With as many blocks as the text of these tokens is known for, if those are cached that the query behind them sees.
// Null: there is no second tier, or it is not asked.
FoundBlocks find_window(const KvCacheManager& manager, const EvictedTexts& evicted,
                        std::span<const common::Token> tokens, std::uint64_t salt, int window,
                        const HostCache* tier = nullptr);

// Plans the copies of what find_window() found on the host for these arguments, and publishes the blocks: then all that
// is found is in the pool. As many blocks as that must be without an owner, besides those found. Returns false if what
// is evicted for that takes the place of some on the host, or if there is no memory to publish them: then the prompt
// has to be looked up again.
bool bring_back(KvCacheManager& manager, const EvictedTexts& evicted, HostCache& tier, FoundBlocks& found,
                std::span<const common::Token> tokens, std::uint64_t salt, int window);

}  // namespace
