// The pool of the layers with a window, in models in which other layers see all tokens. Bookkeeping in integers.
//
// The engine's manager, its tables and its block numbers are those of the layers that see all. For a layer with a
// window these numbers are names: its K and V of a block are in the block's *part*, a block of another, smaller pool.
// Only this class knows which blocks have one. A block that no window reaches can do without, and its place in the
// tables stays what it is:
//
//   block_size 4, window 6, 13 tokens: the next query sees positions 8 … 13
//   block table         [7, 1, 3, 5]
//   parts of its blocks [-, -, 0, 1]
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "../../block_copy.h"
#include "../../kv_cache_manager.h"
#include "../host_cache/host_cache.h"

namespace stage8 {

// In how many blocks the tokens of a window can lie.
constexpr int max_blocks_of_window(int window, int block_size) { return (window + block_size - 2) / block_size + 1; }

struct LocalPoolSize {
  int num_parts = 0;   // that windows hold, or a text whose windows have gone on
  int num_blocks = 0;  // of the layers that see all
  int num_host_blocks = 0;
  int block_size = 0;
  int window = 0;
};

class LocalPool {
 public:
  explicit LocalPool(const LocalPoolSize& size);

  const LocalPoolSize& size() const { return size_; }
  // The block's part, or -1. The part of a host block has the block's own number. The others are numbered from 0 on,
  // the smallest that is free first.
  int part_of(int block) const { return part_of_[static_cast<std::size_t>(block)]; }
  bool is_free(int part) const { return users_[static_cast<std::size_t>(part)].empty(); }

  // The second tier of the engine's prefix cache: from now on, its copies come before the manager's, and a part goes
  // with each block that has one.
  void attach(std::shared_ptr<const HostCache> tier) { tier_ = std::move(tier); }
  // Whether the block, of the pool or of the host, has a part once the copies have been carried out that are planned.
  bool will_have_part(const KvCacheManager& manager, int block) const;

  // How many parts the live windows need, with all slots that are reserved. A scheduler keeps it to num_parts. To be
  // called before a sequence that this step has admitted is swapped out: it notes which parts go along.
  int num_needed(const KvCacheManager& manager);

  // With how many of these published blocks, which hold the beginning of a text, a sequence can begin: with the most
  // whose last window has its parts. A block without one shares the part of another block with the same text, or gets
  // the one that such a block has in the second tier. The last ones may be blocks of that tier, which have a part or
  // none.
  std::size_t share_parts(const KvCacheManager& manager, std::span<const int> blocks);

  // To be called before a step is scheduled, and when all its slots are reserved: gives parts to the blocks that are
  // reserved, and plans the copies that belong to the manager's. For parts that are missing, other blocks lose theirs,
  // first the one that has not been in a window for the longest time. If memory runs out, it throws, and can be called
  // again.
  void begin_step(const KvCacheManager& manager);
  void end_step(const KvCacheManager& manager);

  // The planned copies of parts that are not carried out yet: in this order, before the next step.
  std::span<const BlockCopy> pending_copies() const { return pending_copies_; }
  void clear_pending_copies() { pending_copies_.clear(); }
  // The first `count` of them have been carried out.
  void clear_pending_copies(std::size_t count) {
    pending_copies_.erase(pending_copies_.begin(), pending_copies_.begin() + static_cast<std::ptrdiff_t>(count));
  }

  int num_held() const { return num_held_; }                 // by the windows of the step that was scheduled last
  int num_cached() const { return num_used() - num_held_; }  // of blocks that no window reaches
  std::int64_t num_evicted() const { return num_evicted_; }  // parts that were given up for others, so far
  // For tests: parts that came back from the second tier to blocks of the pool, so far.
  std::int64_t num_brought_back() const { return num_brought_back_; }

 private:
  using Blocks = std::multiset<int>;
  // Of planned copies.
  struct Sources {
    Blocks all;
    Blocks kept;  // those whose parts must be copied, too
  };

  int num_used() const { return static_cast<int>(order_.size()); }
  // Of the second tier's planned copies, and then of the manager's: what is translated stays in front, also when the
  // tier takes copies of the manager over.
  std::vector<BlockCopy> untranslated(const KvCacheManager& manager) const;
  // Whether the block has a part once these copies have been carried out.
  bool has_part_after(std::span<const BlockCopy> copies, int block) const;
  // With how many of these blocks a sequence can begin if these have parts.
  std::size_t num_usable(std::span<const int> blocks, const std::function<bool(int block)>& has_part) const;
  // Of the blocks with which a sequence begins, the first that its next query sees.
  std::size_t first_seen(std::size_t num_blocks) const {
    const int first = static_cast<int>(num_blocks) * size_.block_size + 1 - size_.window;
    return static_cast<std::size_t>(std::max(0, first) / size_.block_size);
  }
  // Gives these blocks the parts of host blocks, as far as there is room, and plans the copies. copies: all that are
  // not translated.
  void bring_back(const KvCacheManager& manager, std::span<const BlockCopy> copies, std::span<const int> blocks,
                  const std::map<int, int>& on_host);
  // Plans the copies of parts that belong to the new ones. A copy on write shares the part, until it is written to.
  void translate(const KvCacheManager& manager);
  void share_part(int block, int part);
  // Gives the block a part that no other block has. Those of blocks that a window reaches are not taken for it, nor
  // those of `sources`, unless no others are left: then those that need not be kept.
  void give_part(int block, const Sources& sources);
  void drop_part(int block);
  // Gives up the part that has not been in a window for the longest time. Returns false if a window or `sources` need
  // all of them.
  bool evict(const Blocks& sources);

  // Whether the block, or the part if it is one, is counted for the first time since begin_count().
  void begin_count() { count_ += 1; }
  bool count_block(int block) { return count(static_cast<std::size_t>(block)); }
  bool count_part(int part) { return count(part_of_.size() + static_cast<std::size_t>(part)); }
  bool count(std::size_t index) { return std::exchange(last_count_[index], count_) != count_; }
  bool is_counted(int block) const { return last_count_[static_cast<std::size_t>(block)] == count_; }

  LocalPoolSize size_;
  std::shared_ptr<const HostCache> tier_;  // null if there is none
  std::vector<int> part_of_;               // by block, host blocks included
  std::vector<std::vector<int>> users_;    // by part: the blocks that have it
  // Used parts, first the one that has not been in a window for the longest time. The others are in unused_: a change
  // between the lists allocates no memory.
  std::list<int> order_;
  std::list<int> unused_;
  std::vector<std::list<int>::iterator> positions_;  // by part: in one of the lists
  std::vector<int> smallest_unused_;                 // a heap of those in unused_
  std::vector<bool> reached_;                        // by block: whether a window did in this step, before a preemption
  std::vector<std::int64_t> last_count_;             // by block, and then by part
  std::int64_t count_ = 0;
  std::vector<BlockCopy> pending_copies_;
  std::size_t num_translated_ = 0;  // the first pending copies: their parts' copies are planned
  bool is_complete_ = true;         // whether end_step() has returned
  int num_held_ = 0;
  std::int64_t num_evicted_ = 0;
  std::int64_t num_brought_back_ = 0;
};

// What a runner is that can hold K and V of the layers with a window in a pool of their own.
class SeparateWindows {
 public:
  virtual ~SeparateWindows() = default;

  // How many blocks these layers have if the others have num_blocks.
  using NumParts = std::function<int(int num_blocks)>;
  // From the first step on, which comes later, these layers have fewer blocks; the scheduler keeps the pool's books.
  // The others have num_blocks, which may be more than before, see Runner::cache(); 0: as many as the memory holds.
  // Null, and nothing changes, if these would be as many as the others.
  virtual std::shared_ptr<LocalPool> separate_windows(const NumParts& num_parts, int num_blocks) = 0;
};

}  // namespace
