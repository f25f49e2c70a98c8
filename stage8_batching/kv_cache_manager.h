// Bookkeeping in integers: which sequence owns which slots. A slot is a row of the KV storage, one token wide.
//
//   block_size 4, block_table [7, 1, 3]:   positions 0 1 2 3 | 4 5 6 7 |  8  9 …
//                                          slots    28 …  31 | 4 …   7 | 12 13 …
//   position 9 = 2 * 4 + 1: entry 2 of the table is block 3, row 1 of it is slot 3 * 4 + 1 = 13
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <vector>

#include "prefix_cache.h"

namespace stage8 {

using SequenceId = int;

// Blocks that hold num_tokens tokens.
int blocks_needed(int num_tokens, int block_size);

// Counted in slots. reserved - used is internal fragmentation: at most block_size - 1 slots a sequence.
struct Usage {
  int total = 0;
  // Owned by one sequence or by several; a slot counts once.
  int reserved = 0;
  // Of those, holding a token.
  int used = 0;
  // Owned by nobody, and holding tokens that are kept until the slots are needed.
  int cached = 0;
};

// What copy-on-write leaves to do: a block's K and V, in all layers, have to get into another block too.
struct BlockCopy {
  int source = 0;
  int destination = 0;
};

// On what terms a sequence is admitted to the cache.
struct Admission {
  // Of the tokens that are not found in the cache, so many at most get slots for now.
  int max_tokens = std::numeric_limits<int>::max();
  // Blocks that are left for running sequences to grow into.
  int spare_blocks = 0;
  // Whether blocks that others have computed are looked for.
  bool use_prefix_cache = true;
};

class KvCacheManager {
 public:
  // num_host_blocks: room for what is swapped out, in blocks that are numbered from num_blocks on.
  KvCacheManager(int num_blocks, int block_size, HashFunction hash = hash_block, int num_host_blocks = 0);

  // Starts a sequence and finds slots for its first num_tokens tokens, in blocks that lie anywhere. More can follow.
  // False if there are none; nothing has changed then. A live id is a checked error.
  bool allocate(SequenceId sequence, int num_tokens);

  // Likewise for tokens that are known: full blocks that hold the first of them already are shared, and length() says
  // how many tokens that saves. At least one is left to compute, or there would be no logits. Only sequences of one
  // salt share.
  bool allocate(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt = 0,
                const Admission& admission = {});

  // Makes sure that num_tokens more tokens have slots, in blocks that no other sequence reads: a partly filled block
  // with other owners is replaced, and its copy planned. False if that can't be; nothing has changed then.
  bool reserve(SequenceId sequence, int num_tokens);

  // Whether reserve() would succeed for these sequences one after the other, each with num_tokens.
  bool can_reserve(std::span<const SequenceId> sequences, int num_tokens) const;

  // Starts a sequence with all that the parent has in the cache. No float moves: both own the same blocks from now on.
  void fork(SequenceId parent, SequenceId child);

  // The copies planned and not yet carried out: in this order, and before anything else is written.
  std::span<const BlockCopy> pending_copies() const { return pending_copies_; }
  // All of them have been carried out.
  void clear_pending_copies() { pending_copies_.clear(); }

  // The slots of positions first … first + count - 1, all of them reserved: the slot mapping.
  std::vector<int> slots(SequenceId sequence, int first, int count) const;

  // The K and V of num_tokens reserved tokens are in the cache now, in all layers: they count towards the length.
  void commit(SequenceId sequence, int num_tokens);

  // Likewise, and says which tokens they are: blocks that are full now can be shared from now on.
  void commit(SequenceId sequence, std::span<const common::Token> tokens);

  // Ends the sequence and gives back what it alone owns. What others may share stays in the prefix cache, the end of
  // the sequence the first to be evicted.
  void free(SequenceId sequence);

  // Takes the sequences out of the cache, into the processor's memory: plans the copies, one for a block that several
  // of them own, and gives their blocks back. Until they are swapped in, all that can be done is to free them. False if
  // there is no room; nothing has changed then.
  bool swap_out(std::span<const SequenceId> sequences);
  // The other way round, all of them at once, in blocks that lie anywhere; spare_blocks stay free.
  bool swap_in(std::span<const SequenceId> sequences, int spare_blocks = 0);
  bool is_swapped(SequenceId sequence) const { return swapped_.contains(sequence); }
  // Of these sequences alone, a block counted once. Swapped out, it is what swap_in() has to find room for.
  Usage usage_of(std::span<const SequenceId> sequences) const;
  int num_free_host_blocks() const { return static_cast<int>(free_host_blocks_.size()); }

  // How many tokens have their K and V in the cache. The next token's position is the length.
  int length(SequenceId sequence) const;

  // How many tokens the slots it owns can hold.
  int capacity(SequenceId sequence) const;

  // The sequence's blocks in order: ceil(length / block_size) of them, or more where slots are reserved ahead.
  const std::vector<int>& block_table(SequenceId sequence) const;

  bool contains(SequenceId sequence) const { return sequences_.contains(sequence); }
  std::vector<SequenceId> sequences() const;  // the live ones, ascending
  int block_size() const { return block_size_; }
  const std::vector<int>& free_blocks() const { return free_blocks_; }
  const PrefixCache& prefix_cache() const { return prefix_cache_; }
  void reset_prefix_cache();  // nothing computed so far is shared any more
  // In how many block tables it stands; 0: it is free, or cached.
  int reference_count(int block) const { return reference_counts_.at(static_cast<std::size_t>(block)); }
  Usage usage() const;

 private:
  struct Sequence {
    std::vector<int> block_table;
    int length = 0;
    std::vector<common::Token> tail;  // the tokens in the last block, as long as it is not full
    std::uint64_t salt = 0;
  };

  Sequence& find(SequenceId sequence);
  const Sequence& find(SequenceId sequence) const;
  int num_available() const;  // blocks that nobody owns: free ones, and cached ones that can be evicted
  int take_block();
  void release_block(int block);
  void release_host_block(int block);

  int num_blocks_;
  int block_size_;
  std::vector<int> free_blocks_;  // a stack: the block freed last is used first, while it is still in the caches
  std::map<SequenceId, Sequence> sequences_;
  std::vector<int> reference_counts_;  // by block, host blocks included
  std::vector<BlockCopy> pending_copies_;
  PrefixCache prefix_cache_;
  std::map<SequenceId, Sequence> swapped_;  // their block tables name host blocks
  std::vector<int> free_host_blocks_;
  std::map<int, std::vector<common::Token>> host_tokens_;  // of the host blocks whose text can be found once it is back
};

}  // namespace
