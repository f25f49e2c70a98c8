// Who owns blocks, beyond what KvCacheManager has functions for: to it, a sequence begins with the first block of its
// text, and keeps all of them until it ends. Of the code in production/, only what is here reaches into its protected
// members.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../../kv_cache_manager.h"

namespace stage8 {

// Blocks without an owner: free ones, and cached ones that can be evicted.
int num_available(const KvCacheManager& manager);

// Blocks that a sequence of no request holds while this lives. At most one object at a time holds any.
class HeldBlocks {
 public:
  // CheckError if there are fewer than num_blocks without an owner.
  HeldBlocks(KvCacheManager& manager, int num_blocks);
  ~HeldBlocks();
  HeldBlocks(const HeldBlocks&) = delete;
  HeldBlocks& operator=(const HeldBlocks&) = delete;

  const std::vector<int>& blocks() const { return manager_.block_table(kHolder); }
  int front() const { return blocks().front(); }

 private:
  static constexpr SequenceId kHolder = -1;  // engines number from 0

  KvCacheManager& manager_;
  bool is_holding_;
};

// Published blocks that are not evicted while this lives.
class KeptBlocks {
 public:
  KeptBlocks(KvCacheManager& manager, std::vector<int> blocks);
  ~KeptBlocks();
  KeptBlocks(const KeptBlocks&) = delete;
  KeptBlocks& operator=(const KeptBlocks&) = delete;

 private:
  KvCacheManager& manager_;
  std::vector<int> blocks_;
};

// Publishes a block as PrefixCache does.
void publish_block(KvCacheManager& manager, int block, int parent, std::span<const common::Token> tokens,
                   std::uint64_t salt);

// Replaces a full block of the table that no later step reads by `stand_in`, a block with an owner, so that positions
// stay.
void replace_block(KvCacheManager& manager, SequenceId sequence, int index, int stand_in);

// Starts a sequence whose first tokens are computed: these full blocks, which are published, are in its table. A
// reserve() of num_tokens tokens then needs no memory. If memory runs out, nothing changes.
void start_with(KvCacheManager& manager, SequenceId sequence, std::vector<int> blocks, std::uint64_t salt,
                int num_tokens);

// Counts a lookup in the prefix cache, which has found num_blocks blocks.
void count_lookup(KvCacheManager& manager, std::size_t num_blocks);

}  // namespace
