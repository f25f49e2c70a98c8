// The host blocks of a runner on a GPU: pinned memory, which the device can copy while the host continues. Pinning
// takes long, about half a second for each GiB, so it is done in pieces, most of them by a thread beside the engine.
// And copies have a stream of their own, so that they do not wait for the step that is being computed:
//
//   steps   | step 1 | step 2                     | step 3
//   copies           | out and back, for step 3 |
//
// A copy goes into this stream only if no step that is being computed reads or writes its block.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../block_copy.h"
#include "../kernels/host_pages.h"
#include "common/cuda/runtime/device.h"
#include "common/paged/paged_kernels.h"

namespace stage8 {

// The size of a piece, which decides for how long the device's driver is busy with one. Tests change it.
extern std::size_t pinned_piece_bytes;

class PinnedBlocks {
 public:
  // They are numbered from shape.num_blocks on. Nothing is allocated yet.
  PinnedBlocks(const common::PageShape& shape, int num_layers, int num_blocks);
  ~PinnedBlocks();  // waits for the piece that is being pinned
  PinnedBlocks(const PinnedBlocks&) = delete;
  PinnedBlocks& operator=(const PinnedBlocks&) = delete;

  // As HostBlocks'. One piece is there at least, so that a small tier is complete at once. May be called once.
  void allocate(int count);
  int num_allocated() const { return num_allocated_.load(std::memory_order_acquire); }
  std::string why_no_more() const { return has_failed_.load(std::memory_order_acquire) ? why_no_more_ : std::string(); }

  // To be called before a step is enqueued in `steps`.
  void before_step(const common::Stream& steps) { before_step_.record(steps); }
  // As HostBlocks'; `steps` is the stream of the steps, and the pages' first layer is given.
  void copy_beside(const common::Pages& pages, std::span<const BlockCopy> copies, const common::Stream& steps);
  // As copy_blocks: enqueues copies in `steps`, in this order. copy_inside: copies between blocks of the pages, which
  // can be carried out in any order. If it throws, some may have been enqueued. A host block is allocated now if
  // allocate() has not been called.
  void copy_behind(const common::Pages& pages, std::span<const BlockCopy> copies, const common::Stream& steps,
                   const std::function<void(std::span<const BlockCopy>)>& copy_inside);

 private:
  bool contains(int block) const { return block >= first_block_; }
  // Between one of these blocks and a block of the pages.
  void copy(const common::Pages& pages, BlockCopy copy, const common::Stream& stream);
  void pin_until(int count);
  void pin_in_background(int device) noexcept;
  void stay(const char* reason) noexcept;  // no more come

  common::PageShape shape_;
  int num_layers_;
  int first_block_;
  int num_blocks_;
  int blocks_per_piece_;
  common::Stream copies_;
  common::Event before_step_;  // the last one, or behind the copies since
  common::Event copied_;
  std::vector<std::unique_ptr<HostPages>> pieces_;  // those with allocated blocks do not change any more
  std::atomic<int> num_allocated_ = 0;
  std::string why_no_more_;  // written once, before has_failed_
  std::atomic<bool> has_failed_ = false;
  std::atomic<bool> stops_ = false;
  std::thread pinning_;
};

}  // namespace
