// A runner whose host blocks are allocated while the engine serves, as on a GPU, and whose copies beside a step are
// carried out as early as a GPU may: before that step is computed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "tests/stages/late_runner.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/host_cache/host_blocks.h)
// clang-format on

namespace tests {

class HostBlocksRunner : public LateRunner, public stage::HostBlocks {
 public:
  // num_more: how many host blocks are allocated from the start, beside those that are asked for.
  HostBlocksRunner(std::unique_ptr<stage::Runner> inner, int num_more) : LateRunner(std::move(inner)), num_(num_more) {}

  void allocate(int count) override { num_ = std::min(num_ + count, cache().num_host_blocks); }
  int num_allocated() const override { return num_; }
  std::string why_no_more() const override { return why_no_more_; }
  void copy_blocks(std::span<const stage::BlockCopy> copies) override {
    check(copies);
    LateRunner::copy_blocks(copies);
    num_behind_ += copies.size();
  }
  void copy_beside(std::span<const stage::BlockCopy> copies) override {
    check(copies);
    for (const auto& [source, destination] : copies) {
      COMMON_CHECK((source < cache().num_blocks) != (destination < cache().num_blocks),
                   "what is copied beside a step goes to the host, or comes from there");
    }
    copy_early(copies);
    num_beside_ += copies.size();
  }

  // More blocks have been allocated.
  void grow(int count) { allocate(count); }
  void grow_no_more(const std::string& reason) { why_no_more_ = reason; }
  std::size_t num_beside() const { return num_beside_; }  // copies
  std::size_t num_behind() const { return num_behind_; }

 private:
  void check(std::span<const stage::BlockCopy> copies) const {
    for (const auto& [source, destination] : copies) {
      COMMON_CHECK(std::max(source, destination) < cache().num_blocks + num_,
                   "a host block is copied that is not allocated");
    }
  }

  int num_;
  std::string why_no_more_;
  std::size_t num_beside_ = 0;
  std::size_t num_behind_ = 0;
};

}  // namespace tests
