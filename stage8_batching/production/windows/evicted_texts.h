// What stood before the blocks that are cached, after those before them were evicted. Bookkeeping in integers.
//
// A block is found if its tokens, and the tokens of all blocks before it, are equal. Where every layer has a window, a
// prompt needs only the last of these blocks, but it has to be known that the others are equal. PrefixCache numbers
// texts: equal numbers are equal texts. So a text that is evicted is remembered by its number, that of the text before,
// and its tokens. The opposite does not hold: a text that was evicted and computed again has two numbers.
//
// A text is forgotten if no cached block goes on with it, in the pool or in a second tier. That is
// checked whenever as many have been added as both have blocks. There are never more than kMaxPerBlock for each of
// these blocks: then no more are remembered, and blocks behind those are computed again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../kv_cache_manager.h"
#include "../host_cache/host_cache.h"
#include "common/base/tensor.h"

namespace stage8 {

class EvictedTexts {
 public:
  using TextId = PrefixCache::TextId;
  static constexpr int kMaxPerBlock = 16;

  // num_blocks: of the pool. Null: there is no second tier.
  explicit EvictedTexts(int num_blocks, std::shared_ptr<const HostCache> tier = nullptr)
      : num_blocks_(num_blocks), tier_(std::move(tier)) {}

  // Remembers the text of a block that is about to be evicted. Without memory, the text is lost.
  void add(const PrefixCache& pool, int block) noexcept;

  // Adds the numbers of the texts that go on with these tokens after the text `parent`; 0: they are the first.
  void find(TextId parent, std::span<const common::Token> tokens, std::uint64_t salt, std::set<TextId>& found) const;

  std::size_t size() const { return texts_.size(); }
  int num_blocks() const { return num_blocks_; }

 private:
  struct Text {
    TextId text = 0;
    TextId parent = 0;  // 0: it is the first block
    std::vector<common::Token> tokens;
    std::uint64_t salt = 0;  // as in a TextLink
  };

  // Forgets the texts that no cached block goes on with.
  void forget_useless(const PrefixCache& pool);

  int num_cached() const { return num_blocks_ + (tier_ != nullptr ? tier_->num_blocks() : 0); }

  int num_blocks_;
  std::shared_ptr<const HostCache> tier_;
  int num_added_ = 0;                                   // since forget_useless()
  std::unordered_multimap<std::uint64_t, Text> texts_;  // by a hash of parent, tokens and salt
};

}  // namespace
