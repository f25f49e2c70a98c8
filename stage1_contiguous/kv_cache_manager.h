// Bookkeeping in integers: which sequence owns which slots. A slot is a row of the KV storage, one token wide.
//
//   slots   0 1 2 3 4 5 6 7 8 9 …
//           [ sequence 0  ]       [ sequence 1 ]      each a contiguous region, reserved for the longest it may get
//           x x x . . . .         x x . . . .         x: holds a token   .: reserved, and nobody else may use it
#pragma once

#include <map>
#include <vector>

namespace stage1 {

using SequenceId = int;

// Neighbouring slots first … first + size - 1.
struct Region {
  int first = 0;
  int size = 0;
};

// Counted in slots. reserved - used is internal fragmentation; free slots in holes too small are external.
struct Usage {
  int total = 0;
  // Owned by a sequence.
  int reserved = 0;
  // Of those, holding a token.
  int used = 0;
};

class KvCacheManager {
 public:
  explicit KvCacheManager(int num_slots);

  // Starts a sequence and finds slots for num_tokens tokens, all it will ever have: neighbours, in the first hole that
  // is large enough. False if there are none; nothing has changed then. A live id is a checked error.
  bool allocate(SequenceId sequence, int num_tokens);

  // Makes sure that num_tokens more tokens have slots. False if that can't be; nothing has changed then.
  bool reserve(SequenceId sequence, int num_tokens);

  // The slots of positions first … first + count - 1, all of them reserved: the slot mapping.
  std::vector<int> slots(SequenceId sequence, int first, int count) const;

  // The K and V of num_tokens reserved tokens are in the cache now, in all layers: they count towards the length.
  void commit(SequenceId sequence, int num_tokens);

  // Ends the sequence and gives back all it owns.
  void free(SequenceId sequence);

  // How many tokens have their K and V in the cache. The next token's position is the length.
  int length(SequenceId sequence) const;

  // How many tokens the slots it owns can hold.
  int capacity(SequenceId sequence) const;

  // Position p of the sequence lives in slot region.first + p.
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
  std::vector<Region> holes_;  // ascending; never empty regions, never two that touch
  std::map<SequenceId, Sequence> sequences_;
};

}  // namespace
