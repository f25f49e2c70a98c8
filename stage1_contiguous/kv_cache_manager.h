// Bookkeeping in integers: which sequence owns which slots. A slot is a row of the KV storage, one token wide.
//
//   slots   0 1 2 3 4 5 6 7 8 9 …
//           [ sequence 0  ]       [ sequence 1 ]      each a contiguous region, reserved for the longest it may get
//           x x x . . . .         x x . . . .         x: holds a token   .: reserved, still empty
#pragma once

#include <map>
#include <vector>

namespace stage1 {

using SequenceId = int;

// Contiguous slots: first … first + size - 1.
struct Region {
  int first = 0;
  int size = 0;
};

// Counted in slots. What is reserved and not used waits for tokens to come, or is never used: internal fragmentation.
// Free slots in holes that are too small are external fragmentation.
struct Usage {
  int total = 0;
  // Owned by a sequence.
  int reserved = 0;
  // Reserved slots that hold a token.
  int used = 0;
};

class KvCacheManager {
 public:
  explicit KvCacheManager(int num_slots);

  // Starts a sequence and reserves num_tokens slots, all it will ever have: contiguous, in the first hole that is large
  // enough. Returns false and changes nothing if no hole is. CheckError if the id is live.
  bool allocate(SequenceId sequence, int num_tokens);

  // Makes sure that num_tokens tokens beyond the length have slots. Returns false and changes nothing if that is
  // impossible.
  bool reserve(SequenceId sequence, int num_tokens);

  // The slot mapping of positions first … first + count - 1, which must be reserved: [count].
  std::vector<int> slots(SequenceId sequence, int first, int count) const;

  // Counts num_tokens more tokens towards the length: their K and V have been written, in all layers. Their slots must
  // be reserved.
  void commit(SequenceId sequence, int num_tokens);

  // Ends the sequence and frees all slots that it owns.
  void free(SequenceId sequence);

  // How many tokens have their K and V in the cache. The next token's position is the length.
  int length(SequenceId sequence) const;

  // How many tokens fit into the sequence's slots.
  int capacity(SequenceId sequence) const;

  // Position p of the sequence is in slot region.first + p.
  Region region(SequenceId sequence) const;

  bool contains(SequenceId sequence) const { return sequences_.contains(sequence); }
  std::vector<SequenceId> sequences() const;  // the live ones, ascending
  const std::vector<Region>& holes() const { return holes_; }
  Usage usage() const;

 private:
  struct Sequence {
    Region region;
    int length = 0;
  };

  Sequence& find(SequenceId sequence);
  const Sequence& find(SequenceId sequence) const;

  int num_slots_;
  std::vector<Region> holes_;  // ascending; none is empty, no two touch
  std::map<SequenceId, Sequence> sequences_;
};

}  // namespace
