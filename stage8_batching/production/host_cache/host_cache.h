// A second tier of the prefix cache: a block that is evicted from the pool is copied to the host's memory, and copied
// back when a prompt goes on with its text there. Bookkeeping in integers, as in the manager: it plans copies, and
// host_cache_runner.h carries them out. HOST_CACHE.md has an example by hand.
//
// A text is identified as in the pool, by PrefixCache's numbers: a block is found if its tokens, and the tokens of all
// blocks before it, are equal, wherever those blocks are. So a block's ancestors need not be on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "../../kv_cache_manager.h"
#include "common/base/tensor.h"

namespace stage8 {

// Counts of events so far.
struct HostCacheStatistics {
  std::int64_t stored = 0;     // blocks copied out of the pool
  std::int64_t restored = 0;   // blocks copied back
  std::int64_t hits = 0;       // sequences for which at least one block was
  std::int64_t evictions = 0;  // blocks whose texts were given up
};

class HostCache {
 public:
  // Its blocks are numbered first_block … first_block + num_blocks - 1: host blocks of the runner's cache that the
  // manager does not know. The first num_there of them can be used from the start.
  HostCache(int first_block, int num_blocks, int block_size, int num_there);
  HostCache(int first_block, int num_blocks, int block_size)
      : HostCache(first_block, num_blocks, block_size, num_blocks) {}
  // Entries hold iterators into the lists.
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;

  // Keeps the text of a block that is about to be evicted from the pool, and plans its copy unless the text is here
  // already. If there is no room, the block that has not been used for the longest time makes some. Without memory, the
  // text is lost. lacks_part: whether the given host block, which has the text already, lacks a part
  // (../windows/local_pool.h) that the evicted block has: then it is copied again. Where blocks have parts, a block
  // that a planned copy reads is not overwritten, and the evicted text is lost instead: a part that goes to such a
  // block could not be given up (LocalPool::translate()).
  void store(const PrefixCache& pool, int block,
             const std::function<bool(int host_block)>& lacks_part = nullptr) noexcept;

  // The host blocks with the beginning of `tokens`, in the text that follows the pool's text with the number `parent`,
  // or, if that is 0, from the beginning of a text of this salt's tenants.
  std::vector<int> find(std::int64_t parent, std::span<const common::Token> tokens, std::uint64_t salt) const;
  // The same, of a whole prompt, of which the pool has the beginning: now these blocks have been used last.
  void touch(const PrefixCache& pool, std::span<const common::Token> tokens, std::uint64_t salt);
  // The same, of these host blocks, given in the order of their text.
  void touch(std::span<const int> blocks);

  // For a sequence that has just been allocated with these terms: what it lacks of its text begins with `tokens`. The
  // blocks with all of them but the last are brought back into the sequence's own new blocks, where they count as
  // computed and are published: as many as leave the spare blocks, and room for what the step computes. Some of the
  // sequence's slots may not be reserved any more. If memory runs out, it throws, and those that were brought back
  // hold. num_usable: behind how many of these host blocks the sequence can go on; absent: behind any number.
  using NumUsable = std::function<std::size_t(std::span<const int> found)>;
  void restore(KvCacheManager& manager, SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt,
               const Admission& admission, const NumUsable& num_usable = nullptr);

  // Plans copies from host blocks into the pool's blocks, which a sequence gets: any that have texts, and not only
  // those behind a text of the pool. If memory runs out, nothing changes.
  void bring_back(std::span<const BlockCopy> copies);

  // The planned copies that are not carried out yet, in this order: before all copies that the manager plans in the
  // same step, and before the step.
  std::span<const BlockCopy> pending_copies() const { return pending_copies_; }
  // To be called after the first `count` of them have been carried out.
  void clear_pending_copies(std::size_t count);
  // To be called before a step is scheduled: what a step that failed has left of the manager's copies comes before the
  // next step's copies.
  void take_over_copies(KvCacheManager& manager);

  // From now on, the first num_there blocks can be used; never fewer than before.
  void grow(int num_there) noexcept;

  int num_there() const { return static_cast<int>(in_use_.size() + free_.size()); }
  int num_blocks() const { return static_cast<int>(entries_.size()); }
  int num_used() const { return static_cast<int>(in_use_.size()); }
  // The number of a host block's text, and that of the text before; 0: it is the first block.
  std::int64_t text(int block) const { return entry(block).text; }
  std::int64_t parent(int block) const { return entry(block).parent; }
  // Blocks with a text, the one that has not been used for the longest time first.
  const std::list<int>& in_use() const { return in_use_; }
  const HostCacheStatistics& statistics() const { return statistics_; }

 private:
  struct Entry {
    std::int64_t text = 0;    // its number in the pool when it was last there
    std::int64_t parent = 0;  // that of the text before; 0: it is the first block
    std::vector<common::Token> tokens;
    std::uint64_t salt = 0;             // as in a TextLink
    std::list<int>::iterator position;  // in in_use_, free_ or missing_
  };
  using Children = std::unordered_multimap<std::uint64_t, int>;  // host blocks, by a hash of tokens and salt

  Entry& entry(int block) { return entries_[static_cast<std::size_t>(block - first_block_)]; }
  const Entry& entry(int block) const { return entries_[static_cast<std::size_t>(block - first_block_)]; }
  // The host block with this text, or -1.
  int find_child(std::int64_t parent, std::span<const common::Token> tokens, std::uint64_t salt) const;
  // The text has another number in the pool now.
  void renumber(int block, std::int64_t text);
  void use(int block) { in_use_.splice(in_use_.end(), in_use_, entry(block).position); }
  void evict();

  int first_block_;
  int block_size_;
  std::vector<Entry> entries_;                           // by block
  std::unordered_map<std::int64_t, Children> children_;  // by parent
  std::list<int> in_use_;
  std::list<int> free_;     // a change between the lists allocates no memory
  std::list<int> missing_;  // can't be used yet
  std::vector<BlockCopy> pending_copies_;
  HostCacheStatistics statistics_;
};

}  // namespace
