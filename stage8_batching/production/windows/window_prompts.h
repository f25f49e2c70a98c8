// Prompts of models whose layers all have the same window: of the cached blocks of their texts, they need only those
// that the first query sees.
//
//   block_size 4, window 6, a prompt of 18 tokens, of which 16 were computed before, in blocks 7, 1, 3 and 5:
//   position 16 sees 11 … 16, in blocks 3 and 5
//   7 and 1 have been evicted: found are [-, -, 3, 5], and the sequence begins with [2, 2, 3, 5], where 2 stands in
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../../kv_cache_manager.h"
#include "evicted_texts.h"

namespace stage8 {

// With which blocks a sequence can begin.
struct FoundBlocks {
  // -1: none of its own, as no query sees it. If that is only one, it is there if it is cached: a block that stands in
  // for it would cost as much.
  std::vector<int> blocks;
  std::size_t num_first = 0;  // so many blocks of its text are cached from the first one on
};

// With as many blocks as the text of these tokens is known for, if those are cached that the query behind them sees.
FoundBlocks find_window(const KvCacheManager& manager, const EvictedTexts& evicted,
                        std::span<const common::Token> tokens, std::uint64_t salt, int window);

}  // namespace
