// Which blocks hold which text. A full block is published under a hash of its tokens and of all tokens before them; a
// sequence that begins with the same tokens takes the block over instead of computing it.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/base/tensor.h"

namespace stage7 {

// Of a full block. parent: the hash of the block before it, 0 for the first. salt: tells tenants apart.
using BlockHash = std::uint64_t;
using HashFunction =
    std::function<BlockHash(BlockHash parent, std::span<const common::Token> tokens, std::uint64_t salt)>;
BlockHash hash_block(BlockHash parent, std::span<const common::Token> tokens, std::uint64_t salt);

// Counts of what happened so far.
struct PrefixStatistics {
  std::int64_t lookups = 0;       // sequences that asked
  std::int64_t hits = 0;          // those that found at least one block
  std::int64_t tokens_saved = 0;  // in the blocks found
  std::int64_t evictions = 0;     // blocks
};

class PrefixCache {
 public:
  PrefixCache(int block_size, HashFunction hash);
  // An entry knows its place in a list: a copy's would be in the original's.
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The published blocks that hold the beginning of `tokens`, up to the first that is not there. A hash only points: a
  // block counts if its own tokens are these, and those of all blocks before it.
  std::vector<int> find(std::span<const common::Token> tokens, std::uint64_t salt) const;

  // The block holds these block_size tokens, after all that `parent` and the blocks before it hold; parent -1: it is
  // the first. Several blocks may hold the same. A parent that is not published leaves the block unpublished too.
  void publish(int block, int parent, std::span<const common::Token> tokens, std::uint64_t salt);

  bool contains(int block) const { return entries_.contains(block); }

  // The last sequence that owned the published block has ended: it can be evicted, after all that were evictable
  // before.
  void make_evictable(int block);
  // A sequence owns it again.
  void reacquire(int block);
  // Takes the block out that has been evictable for longest, and returns it: it is free for other tokens.
  int evict();
  // Evictable blocks, the next one to be evicted first.
  const std::list<int>& evictable() const { return evictable_; }

  // Forgets all blocks. Those that were evictable are returned: they are free.
  std::vector<int> reset();

  // Books what a sequence's lookup has found.
  void count_lookup(std::size_t num_blocks);
  const PrefixStatistics& statistics() const { return statistics_; }

 private:
  // Names a text up to the end of a block: equal for equal texts and for no others, and never used again. That is what
  // a hash can't promise, nor a block's number, because a block may hold another text later.
  using TextId = std::int64_t;

  struct Entry {
    BlockHash hash = 0;
    TextId text = 0;
    TextId parent_text = 0;  // 0: nothing comes before
    std::vector<common::Token> tokens;
    std::uint64_t salt = 0;
    bool is_evictable = false;
    std::list<int>::iterator position;  // in evictable_ or in in_use_
  };

  // The first published block with this hash and these contents, or -1.
  int find_block(BlockHash hash, TextId parent_text, std::span<const common::Token> tokens, std::uint64_t salt) const;
  void forget(int block);

  int block_size_;
  HashFunction hash_;
  TextId last_text_ = 0;
  std::unordered_map<int, Entry> entries_;                            // by block
  std::unordered_map<BlockHash, std::vector<int>> blocks_with_hash_;  // in the order they were published in
  std::list<int> evictable_;
  std::list<int> in_use_;  // the other published blocks, so that a change between the lists takes no memory
  PrefixStatistics statistics_;
};

}  // namespace
