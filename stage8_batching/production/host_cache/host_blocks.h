// Host blocks whose memory arrives while the engine is serving, and copies that do not wait for the step that is being
// computed. For runners on GPUs; a CPU's host blocks are plain memory, and its steps are computed when they are
// enqueued.
#pragma once

#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "../../block_copy.h"

namespace stage8 {

class HostBlocks {
 public:
  virtual ~HostBlocks() = default;

  // Allocates the first `count` of the runner's host blocks, and begins to allocate the others, in their order, while
  // the engine goes on. Throws InputError if there is no memory for the first ones. If there is none for the others, no
  // more come.
  virtual void allocate(int count) = 0;
  // How many can be used: the first ones. May be called while others are being allocated.
  virtual int num_allocated() const = 0;
  // For the user: how many there are, and why no more come. Empty as long as more come, and if all are there.
  virtual std::string why_no_more() const = 0;

  // Carries out copies between host blocks and others, as copy_blocks, but beside the last step that was enqueued, if
  // that was the last call: no block of the copies may be one that this step reads or writes. They wait for all that
  // was enqueued before, and all that is enqueued later waits for them. If it throws, some may have been carried out,
  // and the call must be repeated before the next step: only then does that step wait for them.
  virtual void copy_beside(std::span<const BlockCopy> copies) = 0;
};

struct SplitCopies {
  std::vector<BlockCopy> beside;  // can be carried out beside the last step that was enqueued
  std::vector<BlockCopy> behind;
};

// Splits copies that can be carried out in any order. busy: what the last step reads and writes. Host blocks are
// numbered from num_blocks on.
inline SplitCopies split_copies(std::span<const BlockCopy> copies, std::span<const int> busy, int num_blocks) {
  const std::unordered_set<int> blocks(busy.begin(), busy.end());
  SplitCopies result;
  for (const BlockCopy& copy : copies) {
    const bool is_between = (copy.source < num_blocks) != (copy.destination < num_blocks);
    const bool is_beside = is_between && !blocks.contains(copy.source) && !blocks.contains(copy.destination);
    (is_beside ? result.beside : result.behind).push_back(copy);
  }
  return result;
}

}  // namespace
