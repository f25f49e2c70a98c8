// Host blocks whose memory arrives while the engine is serving. For runners on GPUs; a CPU's host blocks are plain
// memory.
#pragma once

#include <string>

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
};

}  // namespace
