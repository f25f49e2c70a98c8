// The blocks in the processor's memory, for what is swapped out of the cache.
#pragma once

#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/tensor.h"

namespace stage8 {

class HostBlocks {
 public:
  // Numbered from `first` on: below are the cache's own.
  HostBlocks(int first, int count) : first_(first), blocks_(static_cast<std::size_t>(count)) {
    for (int block = first + count - 1; block >= first; --block) {
      free_.push_back(block);
    }
  }

  int num_free() const { return static_cast<int>(free_.size()); }

  // A block for somebody's contents. published: the tokens in it, if others could find them.
  int take(std::vector<common::Token> published) {
    COMMON_CHECK(!free_.empty(), "no host block is free");
    const int block = free_.back();
    free_.pop_back();
    at(block) = {0, std::move(published)};
    return block;
  }
  void add_owner(int block) { at(block).num_owners += 1; }
  // The last one's leaving frees it.
  void remove_owner(int block) {
    if (--at(block).num_owners == 0) {
      free_.push_back(block);
    }
  }
  const std::vector<common::Token>& published(int block) { return at(block).published; }

 private:
  struct Block {
    int num_owners = 0;
    std::vector<common::Token> published;
  };
  Block& at(int block) { return blocks_.at(static_cast<std::size_t>(block - first_)); }

  int first_;
  std::vector<Block> blocks_;
  std::vector<int> free_;
};

}  // namespace
