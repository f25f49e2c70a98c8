// Bookkeeping in integers: which sequence owns which slots. A slot is a row of the KV storage, one token wide.
//
//   block_size 4, block_table [7, 1, 3]:   positions 0 1 2 3 | 4 5 6 7 |  8  9 …
//                                          slots    28 …  31 | 4 …   7 | 12 13 …
//   position 9 = 2 * 4 + 1: entry 2 of the table is block 3, row 1 of it is slot 3 * 4 + 1 = 13
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "block_copy.h"
#include "prefix_cache.h"

namespace stage8 {

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

// The terms on which a sequence is admitted to the cache.
struct Admission {
  // Max tokens that get slots for now, besides those found in the cache.
  int max_tokens = std::numeric_limits<int>::max();
  // Blocks that must stay free for running sequences to grow into.
  int spare_blocks = 0;
  // Whether to share blocks that other sequences have computed.
  bool use_prefix_cache = true;
};

class KvCacheManager {
 public:
  // num_host_blocks: blocks in the host's memory for swapped sequences, numbered from num_blocks on.
  KvCacheManager(int num_blocks, int block_size, HashFunction hash = hash_block, int num_host_blocks = 0);

  // Starts a sequence and reserves slots for its first num_tokens tokens, in blocks that may lie anywhere; reserve()
  // adds more. Returns false and changes nothing if there are too few free blocks. CheckError if the id is live.
  bool allocate(SequenceId sequence, int num_tokens);

  // The same for known tokens: full blocks that already hold the first tokens are shared, and length() says how many
  // tokens that saves. At least one token is left to compute: without it there would be no logits. Only sequences with
  // the same salt share blocks.
  bool allocate(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt = 0,
                const Admission& admission = {});

  // Makes sure that num_tokens tokens beyond the length have slots, in blocks that no other sequence owns: a partly
  // filled block with other owners is replaced by a new one, and the copy is planned. Returns false and changes nothing
  // if that is impossible.
  bool reserve(SequenceId sequence, int num_tokens);

  // Frees what is reserved beyond the length, in whole blocks.
  void release_reserved(SequenceId sequence);

  // The largest num_tokens with which reserve() would succeed.
  int max_reservable(SequenceId sequence) const;

  // Whether reserve() with num_tokens would succeed for all of these sequences, one after the other.
  bool can_reserve(std::span<const SequenceId> sequences, int num_tokens) const;

  // Starts `child` with all tokens that `parent` has in the cache. No float is copied: both own the same blocks from
  // now on. CheckError if the child's id is live.
  void fork(SequenceId parent, SequenceId child);

  // The planned copies that are not carried out yet. They must be carried out in this order, before any other write.
  std::span<const BlockCopy> pending_copies() const { return pending_copies_; }
  // To be called after all of them have been carried out.
  void clear_pending_copies() { pending_copies_.clear(); }
  // The same for the first `count` of them.
  void clear_pending_copies(std::size_t count) {
    pending_copies_.erase(pending_copies_.begin(), pending_copies_.begin() + static_cast<std::ptrdiff_t>(count));
  }

  // The slot mapping of positions first … first + count - 1, which must be reserved: [count].
  std::vector<int> slots(SequenceId sequence, int first, int count) const;

  // Counts num_tokens more tokens towards the length: the step that writes their K and V is enqueued. Their slots must
  // be reserved. Allocates no memory.
  void commit(SequenceId sequence, int num_tokens);

  // The last tokens of the length are these, and their K and V have been written, in all layers: blocks that are full
  // now are published, and can be shared from now on: if the sequence is swapped out, when it is back. If memory runs
  // out, some stay unpublished, and it does not throw.
  void publish(SequenceId sequence, std::span<const common::Token> tokens);

  // Both, for tokens whose K and V have been written already.
  void commit(SequenceId sequence, std::span<const common::Token> tokens);

  // Ends the sequence and frees the blocks that no other sequence owns. Published ones stay in the prefix cache, where
  // the sequence's last block is the first to be evicted.
  void free(SequenceId sequence);

  // Moves the sequences to the host's memory: plans the copies, one for each block even if several sequences own it,
  // and releases their blocks as free() does, from the end of each table. Blocks reserved ahead are only released.
  // Published blocks stay in the prefix cache until they are evicted. Until the sequences are swapped in, they can only
  // be freed. Returns false and changes nothing if there are too few host blocks. CheckError, with nothing changed, if
  // a sequence is not there, is out already or is given twice.
  bool swap_out(std::span<const SequenceId> sequences);
  // Moves the sequences back, into blocks that may lie anywhere, with the same owners as before. What was published is
  // published again under its new number. Returns false and changes nothing if fewer than spare_blocks blocks would
  // stay without an owner. CheckError, with nothing changed, if a sequence is not swapped out or is given twice.
  bool swap_in(std::span<const SequenceId> sequences, int spare_blocks = 0);
  bool is_swapped(SequenceId sequence) const { return swapped_.contains(sequence); }
  // The slots up to the lengths of these sequences, in whole blocks; a shared block counts once.
  Usage usage_of(std::span<const SequenceId> sequences) const;
  int num_free_host_blocks() const { return static_cast<int>(free_host_blocks_.size()); }

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
  // Called with each block that is about to be evicted: its text is still published, and its K and V are not written to
  // before the next pass. Must not throw.
  void on_evict(std::function<void(int block)> callback) { on_evict_ = std::move(callback); }
  // How many block tables contain the block; 0: it is free or cached.
  int reference_count(int block) const { return reference_counts_.at(static_cast<std::size_t>(block)); }
  Usage usage() const;

 protected:
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
  void release_host_block(int block);

  int num_blocks_;
  int block_size_;
  std::vector<int> free_blocks_;  // a stack: the block freed last is used first, while CPU caches still hold it
  std::map<SequenceId, Sequence> sequences_;
  std::vector<int> reference_counts_;  // by block, host blocks included
  std::vector<BlockCopy> pending_copies_;
  PrefixCache prefix_cache_;
  std::map<SequenceId, Sequence> swapped_;  // their block tables contain host blocks
  std::vector<int> free_host_blocks_;
  std::map<int, std::vector<common::Token>> host_tokens_;  // by host block, if it was published before
  std::function<void(int block)> on_evict_;
};

}  // namespace
