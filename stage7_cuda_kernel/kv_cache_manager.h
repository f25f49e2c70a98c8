// Bookkeeping in integers: which sequence owns which slots. A slot is a row of the KV storage, one token wide.
//
//   block_size 4, block_table [7, 1, 3]:   positions 0 1 2 3 | 4 5 6 7 |  8  9 …
//                                          slots    28 …  31 | 4 …   7 | 12 13 …
//   position 9 = 2 * 4 + 1: entry 2 of the table is block 3, row 1 of it is slot 3 * 4 + 1 = 13
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "block_copy.h"
#include "prefix_cache.h"

namespace stage7 {

using SequenceId = int;

// How many blocks hold num_tokens tokens.
int blocks_needed(int num_tokens, int block_size);

// Counted in slots. reserved - used is the empty end of each sequence's last block: at most block_size - 1 slots.
struct Usage {
  int total = 0;
  // Owned by one sequence or by several; a slot counts once.
  int reserved = 0;
  // Reserved slots that hold a token.
  int used = 0;
  // Owned by no sequence, but still holding tokens, until the slots are needed.
  int cached = 0;
};

class KvCacheManager {
 public:
  KvCacheManager(int num_blocks, int block_size, HashFunction hash = hash_block);

  // Starts a sequence and reserves slots for its first num_tokens tokens, in blocks that may lie anywhere; reserve()
  // adds more. Returns false and changes nothing if there are too few free blocks. CheckError if the id is live.
  bool allocate(SequenceId sequence, int num_tokens);

  // The same for known tokens: full blocks that already hold the first tokens are shared, and length() says how many
  // tokens that saves. At least one token is left to compute: without it there would be no logits. Only sequences with
  // the same salt share blocks.
  bool allocate(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt = 0);

  // Makes sure that num_tokens tokens beyond the length have slots, in blocks that no other sequence owns: a partly
  // filled block with other owners is replaced by a new one, and the copy is planned. Returns false and changes nothing
  // if that is impossible.
  bool reserve(SequenceId sequence, int num_tokens);

  // Whether reserve() with num_tokens would succeed for all of these sequences, one after the other.
  bool can_reserve(std::span<const SequenceId> sequences, int num_tokens) const;

  // Starts `child` with all tokens that `parent` has in the cache. No float is copied: both own the same blocks from
  // now on. CheckError if the child's id is live.
  void fork(SequenceId parent, SequenceId child);

  // The planned copies that are not carried out yet. They must be carried out in this order, before any other write.
  std::span<const BlockCopy> pending_copies() const { return pending_copies_; }
  // To be called after all of them have been carried out.
  void clear_pending_copies() { pending_copies_.clear(); }

  // The slot mapping of positions first … first + count - 1, which must be reserved: [count].
  std::vector<int> slots(SequenceId sequence, int first, int count) const;

  // Counts num_tokens more tokens towards the length: the step that writes their K and V is enqueued. Their slots must
  // be reserved. Allocates no memory.
  void commit(SequenceId sequence, int num_tokens);

  // The last tokens of the length are these, and their K and V have been written, in all layers: blocks that are full
  // now are published, and can be shared from now on. If memory runs out, some stay unpublished, and it does not throw.
  void publish(SequenceId sequence, std::span<const common::Token> tokens);

  // Both, for tokens whose K and V have been written already.
  void commit(SequenceId sequence, std::span<const common::Token> tokens);

  // Ends the sequence and frees the blocks that no other sequence owns. Published ones stay in the prefix cache, where
  // the sequence's last block is the first to be evicted.
  void free(SequenceId sequence);

  // How many tokens have their K and V in the cache. The next token's position is the length.
  int length(SequenceId sequence) const;

  // How many tokens fit into the sequence's slots.
  int capacity(SequenceId sequence) const;

  // The sequence's blocks in order: ceil(length / block_size) of them, or more where slots are reserved ahead.
  const std::vector<int>& block_table(SequenceId sequence) const;

  bool contains(SequenceId sequence) const { return sequences_.contains(sequence); }
  std::vector<SequenceId> sequences() const;  // the live ones, ascending
  int block_size() const { return block_size_; }
  const std::vector<int>& free_blocks() const { return free_blocks_; }
  const PrefixCache& prefix_cache() const { return prefix_cache_; }
  void reset_prefix_cache();  // forgets which blocks hold which text
  // How many block tables contain the block; 0: it is free or cached.
  int reference_count(int block) const { return reference_counts_.at(static_cast<std::size_t>(block)); }
  Usage usage() const;

 private:
  struct Sequence {
    std::vector<int> block_table;
    int length = 0;
    int num_known = 0;                // published so far, full blocks or not: its first tokens, in order
    std::vector<common::Token> tail;  // the last of them, in a block that they do not fill
    std::uint64_t salt = 0;
  };

  void check_is_new(SequenceId sequence) const;
  Sequence& find(SequenceId sequence);
  const Sequence& find(SequenceId sequence) const;
  int num_available() const;  // blocks without an owner: free ones, and cached ones that can be evicted
  int allocate_block();
  void release_block(int block);

  int num_blocks_;
  int block_size_;
  std::vector<int> free_blocks_;  // a stack: the block freed last is used first, while CPU caches still hold it
  std::map<SequenceId, Sequence> sequences_;
  std::vector<int> reference_counts_;  // by block
  std::vector<BlockCopy> pending_copies_;
  PrefixCache prefix_cache_;
};

}  // namespace
