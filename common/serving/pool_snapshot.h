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
  int reserved = 0;  // owned by sequences; a shared slot counts once
  int used = 0;      // reserved slots that hold a token
  int cached = 0;    // owned by no sequence, but holding tokens that may be found again
};

// A prefix cache's counts since it was made.
struct PrefixFigures {
  std::int64_t lookups = 0;       // sequences that were looked up
  std::int64_t hits = 0;          // lookups that found at least one block
  std::int64_t tokens_saved = 0;  // found in the cache, and not computed
  std::int64_t evictions = 0;     // blocks that were evicted
  // Of requests that were admitted for the first time: after a preemption a request finds its own text again.
  std::int64_t prompt_tokens = 0;  // looked up: the whole prompts
  std::int64_t prompt_tokens_found = 0;
};

// A second tier of the prefix cache, in the host's memory: all 0 without one. Counts are since it was made.
struct HostCacheFigures {
  int num_blocks = 0;
  int num_allocated = 0;       // of these, so far: the memory arrives while the engine serves
  int num_used = 0;            // with a text
  std::int64_t stored = 0;     // blocks copied there, when the pool evicted them
  std::int64_t restored = 0;   // blocks copied back into the pool
  std::int64_t hits = 0;       // sequences for which at least one was copied back
  std::int64_t evictions = 0;  // blocks whose texts were given up
};

// The pool of layers with a window, where others see all tokens: all 0 if all layers are in one pool. In blocks.
struct WindowPoolFigures {
  int num_blocks = 0;
  int num_held = 0;              // that a window reaches
  int num_cached = 0;            // others that hold tokens
  std::int64_t evictions = 0;    // so far: blocks whose tokens were given up for others
  std::int64_t bytes_saved = 0;  // that these layers would need in addition with as many blocks as the others
};

// Prompts of a model whose layers all have one window. Counts are since the engine was made.
struct WindowPromptFigures {
  std::int64_t prompts = 0;  // that began with cached blocks, although some before them were evicted
  std::int64_t tokens = 0;   // saved by that
};

// Blocks with which several sequences of a step begin, read once for all of them. Counts are since the engine was made.
struct SharedReadingFigures {
  std::int64_t steps = 0;         // that had such blocks
  std::int64_t blocks_read = 0;   // these blocks, once a step
  std::int64_t blocks_saved = 0;  // that would have been read in addition if each sequence had read all of its own
};

// The spans in it belong to the cache: they are valid until it changes.
struct PoolSnapshot {
  struct Sequence {
    std::span<const int> block_table;
    int length = 0;                  // tokens in the cache
    int id = 0;                      // used again once the sequence has ended
    std::vector<Token> tokens = {};  // the cached tokens, by position; empty: they have no text
  };
  struct Owner {
    int id = 0;                            // the request's
    std::vector<Sequence> sequences = {};  // its sequences in the cache
    bool is_swapped = false;               // whether it has other sequences, in the host's memory
    std::vector<std::span<const Token>> texts = {};
    int prompt_tokens = 0;
    int max_tokens = 0;  // of one sequence in the cache, prompt included: what a contiguous region would reserve
  };

  int num_blocks = 0;
  int block_size = 0;
  std::vector<Owner> running = {};
  std::vector<Owner> waiting = {};                         // in the order of the queue
  std::vector<int> cached_blocks = {};                     // the next one to be evicted first
  std::vector<std::span<const Token>> cached_tokens = {};  // the tokens of cached_blocks, in the same order
};

// The contents of a block.
struct BlockState {
  int owner = -1;      // the first request that owns it
  int num_owners = 0;  // requests that own it
  int num_tables = 0;  // block tables that contain it
  int num_tokens = 0;  // in its slots
  bool is_cached = false;
};

// The states of the pool's first max_blocks blocks, or of all blocks if there are fewer.
std::vector<BlockState> block_states(const PoolSnapshot& pool, int max_blocks);

}  // namespace common
