#include "host_cache_runner.h"

#include <utility>

namespace stage8 {

HostCacheRunner::HostCacheRunner(std::unique_ptr<Runner> inner, std::shared_ptr<HostCache> host_cache)
    : inner_(std::move(inner)), host_cache_(std::move(host_cache)), size_(inner_->cache()) {
  size_.num_host_blocks -= host_cache_->num_blocks();
}

void HostCacheRunner::copy_blocks(std::span<const BlockCopy> copies) {
  copy_planned();
  inner_->copy_blocks(copies);
}

StepId HostCacheRunner::enqueue(const RaggedBatch& batch) {
  copy_planned();
  return inner_->enqueue(batch);
}

void HostCacheRunner::copy_planned() {
  while (!host_cache_->pending_copies().empty()) {
    const std::span<const BlockCopy> copies = independent_copies(host_cache_->pending_copies());
    inner_->copy_blocks(copies);
    host_cache_->clear_pending_copies(copies.size());  // later copies may overwrite what these have read
  }
}

}  // namespace
