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

// How many blocks without an owner a sequence takes that begins with such blocks, for num_tokens tokens behind them.
int num_taken(const KvCacheManager& manager, std::span<const int> found, int num_tokens);

// Starts that sequence. A block of its own stands in the places that are -1. Returns false and changes nothing if fewer
// than spare_blocks blocks would stay without an owner. CheckError if nothing is found.
bool allocate_behind(KvCacheManager& manager, SequenceId sequence, std::span<const int> found, std::uint64_t salt,
                     int num_tokens, int spare_blocks);

}  // namespace
