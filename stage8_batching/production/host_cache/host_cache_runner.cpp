#include "host_cache_runner.h"

#include <string>
#include <utility>
#include <vector>

#include "common/app/notes.h"

namespace stage8 {

HostCacheRunner::HostCacheRunner(std::unique_ptr<Runner> inner, std::shared_ptr<HostCache> host_cache)
    : inner_(std::move(inner)),
      host_blocks_(dynamic_cast<HostBlocks*>(inner_.get())),
      host_cache_(std::move(host_cache)),
      size_(inner_->cache()) {
  size_.num_host_blocks -= host_cache_->num_blocks();
}

void HostCacheRunner::copy_blocks(std::span<const BlockCopy> copies) {
  copy_planned();
  inner_->copy_blocks(copies);
}

StepId HostCacheRunner::enqueue(const RaggedBatch& batch) {
  copy_planned();
  find_new_blocks();
  std::vector<int> blocks = batch.block_tables;
  const StepId step = inner_->enqueue(batch);
  last_blocks_ = std::move(blocks);
  return step;
}

void HostCacheRunner::find_new_blocks() {
  if (host_blocks_ != nullptr && host_cache_->num_there() < host_cache_->num_blocks()) {
    host_cache_->grow(host_blocks_->num_allocated() - size_.num_host_blocks);
    if (const std::string reason = host_blocks_->why_no_more(); !reason.empty()) {
      common::print_note(reason);
    }
  }
}

void HostCacheRunner::copy_planned() {
  while (!host_cache_->pending_copies().empty()) {
    const std::span<const BlockCopy> copies = independent_copies(host_cache_->pending_copies());
    copy(copies);
    host_cache_->clear_pending_copies(copies.size());  // later copies may overwrite what these have read
  }
}

void HostCacheRunner::copy(std::span<const BlockCopy> copies) {
  if (host_blocks_ == nullptr) {
    inner_->copy_blocks(copies);
    return;
  }
  const auto [beside, behind] = split_copies(copies, last_blocks_, size_.num_blocks);
  if (!beside.empty()) {
    host_blocks_->copy_beside(beside);
  }
  if (!behind.empty()) {
    inner_->copy_blocks(behind);
  }
}

}  // namespace
