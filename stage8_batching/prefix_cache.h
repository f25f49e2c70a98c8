// Which blocks hold which text. A full block is published under a hash of its tokens and of all tokens before them; a
// sequence that begins with the same tokens shares the block instead of computing it again.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/base/tensor.h"

namespace stage8 {

// The hash of a full block. parent: the hash of the block before it, 0 for the first. salt: keeps tenants apart.
using BlockHash = std::uint64_t;
using HashFunction =
    std::function<BlockHash(BlockHash parent, std::span<const common::Token> tokens, std::uint64_t salt)>;
BlockHash hash_block(BlockHash parent, std::span<const common::Token> tokens, std::uint64_t salt);

// Counts of events so far.
struct PrefixStatistics {
  std::int64_t lookups = 0;       // sequences that were looked up
  std::int64_t hits = 0;          // lookups that found at least one block
  std::int64_t tokens_saved = 0;  // in the blocks found
  std::int64_t evictions = 0;     // blocks
};

class PrefixCache {
 public:
  PrefixCache(int block_size, HashFunction hash);
  // Entries hold iterators into the lists: a copy's would point into the original's.
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The published blocks that hold the beginning of `tokens`, up to the first that is missing. A hash only finds
  // candidates: a block counts if its tokens, and the tokens of all blocks before it, are equal.
  std::vector<int> find(std::span<const common::Token> tokens, std::uint64_t salt) const;

  // Publishes a block that holds these block_size tokens, after the tokens of `parent` and the blocks before it; parent
  // -1: it is the first. Several blocks may hold the same text. Does nothing if the parent is not published, or if
  // there is no memory for an entry. CheckError if the block is published, or if there are not block_size tokens.
  void publish(int block, int parent, std::span<const common::Token> tokens, std::uint64_t salt);

  bool contains(int block) const { return entries_.contains(block); }

  // The published block has lost its last owner: it can be evicted, after the blocks that are evictable already.
  void make_evictable(int block);
  // The evictable block has an owner again.
  void reacquire(int block);
  // Evicts the block that has been evictable for the longest time, and returns it.
  int evict();
  // Evictable blocks, the next one to be evicted first.
  const std::list<int>& evictable() const { return evictable_; }

  // Forgets all blocks, and returns the evictable ones: they are free.
  std::vector<int> reset();

  // Counts a sequence's lookup, which has found num_blocks blocks.
  void count_lookup(std::size_t num_blocks);
  const PrefixStatistics& statistics() const { return statistics_; }

  // Identifies a text from its beginning to the end of a block: equal for equal texts and for no others, and never used
  // again. A hash can't promise that, and neither can a block's number: the block may hold another text later.
  using TextId = std::int64_t;

  struct Entry {
    BlockHash hash = 0;
    TextId text = 0;
    TextId parent_text = 0;  // 0: it is the first block
    std::vector<common::Token> tokens;
    std::uint64_t salt = 0;
    bool is_evictable = false;
    std::list<int>::iterator position;  // in evictable_ or in in_use_
  };
  const Entry& entry(int block) const { return entries_.at(block); }  // of a published block

 private:
  // The first published block with this hash and these contents, or -1.
  int find_block(BlockHash hash, TextId parent_text, std::span<const common::Token> tokens, std::uint64_t salt) const;
  void forget(int block);

  int block_size_;
  HashFunction hash_;
  TextId last_text_ = 0;
  std::unordered_map<int, Entry> entries_;                            // by block
  std::unordered_map<BlockHash, std::vector<int>> blocks_with_hash_;  // in order of publication
  std::list<int> evictable_;
  std::list<int> in_use_;  // the other published blocks; a change between the lists allocates no memory
  PrefixStatistics statistics_;
};

}  // namespace
