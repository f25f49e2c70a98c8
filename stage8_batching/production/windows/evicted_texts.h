// What stood before the blocks that are cached, after those before them were evicted. Bookkeeping in integers.
//
// A block is found if its tokens, and the tokens of all blocks before it, are equal. Where every layer has a window, a
// prompt needs only the last of these blocks, but it has to be known that the others are equal. PrefixCache numbers
// texts: equal numbers are equal texts. So a text that is evicted is remembered by its number, that of the text before,
// and its tokens. The opposite does not hold: a text that was evicted and computed again has two numbers.
//
// A text is forgotten if no cached block goes on with it. Between two times that this is looked after, as many are
// added as the pool has blocks, and there are never more than kMaxPerBlock for each of the pool's blocks: then no more
// are remembered, and blocks behind those are computed again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "../../kv_cache_manager.h"
#include "common/base/tensor.h"

namespace stage8 {

class EvictedTexts {
 public:
  using TextId = PrefixCache::TextId;
  static constexpr int kMaxPerBlock = 16;

  // num_blocks: of the pool.
  explicit EvictedTexts(int num_blocks) : num_blocks_(num_blocks) {}

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
    std::uint64_t salt = 0;
  };

  // Forgets the texts that no cached block goes on with.
  void forget_useless(const PrefixCache& pool);

  int num_blocks_;
  int num_added_ = 0;                                   // since forget_useless()
  std::unordered_multimap<std::uint64_t, Text> texts_;  // by a hash of parent, tokens and salt
};

}  // namespace
