#include "pinned_blocks.h"

#include <algorithm>
#include <cstdint>
#include <exception>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/cuda/runtime/pinned.h"

namespace stage8 {

std::size_t pinned_piece_bytes = std::size_t{32} << 20U;

PinnedBlocks::PinnedBlocks(const common::PageShape& shape, int num_layers, int num_blocks)
    : shape_(shape),
      num_layers_(num_layers),
      first_block_(static_cast<int>(shape.num_blocks)),
      num_blocks_(num_blocks),
      blocks_per_piece_(static_cast<int>(std::max<std::int64_t>(
          static_cast<std::int64_t>(pinned_piece_bytes) / (num_layers * shape.bytes_per_block()), 1))),
      pieces_(static_cast<std::size_t>((num_blocks + blocks_per_piece_ - 1) / blocks_per_piece_)) {}

PinnedBlocks::~PinnedBlocks() {
  stops_ = true;
  if (pinning_.joinable()) {
    pinning_.join();
  }
}

void PinnedBlocks::allocate(int count) {
  COMMON_CHECK(count <= num_blocks_ && !pinning_.joinable(), "host blocks are allocated once");
  const std::int64_t bytes = num_layers_ * shape_.bytes_per_block() * std::max(count, 1);
  const std::int64_t available = common::available_memory_bytes();
  try {
    if (available > 0 && bytes > available) {  // rather than take all that the system has first
      throw common::OutOfPinnedMemory("");
    }
    pin_until(std::min(std::max(count, 1), num_blocks_));
  } catch (const common::OutOfPinnedMemory&) {
    throw common::InputError("the host has no room for " + common::format_bytes(bytes) +
                             " of K and V beside the cache; less of it (--host-slots, --host-cache) may fit");
  }
  if (num_allocated() < num_blocks_) {
    try {
      pinning_ = std::thread([this, device = common::current_device()] { pin_in_background(device); });
    } catch (const std::exception& error) {
      stay(error.what());
    }
  }
}

void PinnedBlocks::pin_until(int count) {
  for (int have = num_allocated(); have < count && !stops_; have = num_allocated()) {
    const int added = std::min(blocks_per_piece_, num_blocks_ - have);
    pieces_[static_cast<std::size_t>(have / blocks_per_piece_)] =
        std::make_unique<HostPages>(shape_, num_layers_, added);
    num_allocated_.store(have + added, std::memory_order_release);
  }
}

void PinnedBlocks::pin_in_background(int device) noexcept {
  try {
    CUDA_CHECK(cudaSetDevice(device));
    pin_until(num_blocks_);
  } catch (const std::exception& error) {
    stay(error.what());
  }
}

void PinnedBlocks::stay(const char* reason) noexcept {
  try {
    const std::int64_t block_bytes = num_layers_ * shape_.bytes_per_block();
    why_no_more_ = "the host's memory for K and V stays at " + common::format_bytes(num_allocated() * block_bytes) +
                   " of " + common::format_bytes(num_blocks_ * block_bytes) + ": " + reason;
    has_failed_.store(true, std::memory_order_release);
  } catch (const std::exception&) {
    // Not even for the note is there memory.
  }
}

void PinnedBlocks::copy(const common::Pages& pages, BlockCopy copy, const common::Stream& stream) {
  int& block = contains(copy.source) ? copy.source : copy.destination;
  const int index = block - first_block_;
  if (index >= num_allocated()) {
    COMMON_CHECK(!pinning_.joinable() && index < num_blocks_, "a host block is copied that is not there");
    pin_until(index + 1);
  }
  block = first_block_ + index % blocks_per_piece_;  // its number in its piece
  pieces_[static_cast<std::size_t>(index / blocks_per_piece_)]->copy(pages.keys, pages.values, copy.source,
                                                                     copy.destination, stream);
}

void PinnedBlocks::copy_beside(const common::Pages& pages, std::span<const BlockCopy> copies,
                               const common::Stream& steps) {
  copies_.wait(before_step_);
  for (const BlockCopy& each : copies) {
    copy(pages, each, copies_);
  }
  copied_.record(copies_);
  steps.wait(copied_);
}

void PinnedBlocks::copy_behind(const common::Pages& pages, std::span<const BlockCopy> copies,
                               const common::Stream& steps,
                               const std::function<void(std::span<const BlockCopy>)>& copy_inside) {
  try {
    while (!copies.empty()) {
      const std::span<const BlockCopy> independent = independent_copies(copies);
      std::vector<BlockCopy> inside;
      for (const BlockCopy& each : independent) {
        if (contains(each.source) || contains(each.destination)) {
          copy(pages, each, steps);
        } else {
          inside.push_back(each);
        }
      }
      copy_inside(inside);
      copies = copies.subspan(independent.size());
    }
  } catch (...) {
    before_step(steps);  // some may be on their way: copies beside a step wait for them too
    throw;
  }
  before_step(steps);
}

}  // namespace
