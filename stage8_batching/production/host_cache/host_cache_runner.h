// A runner around another one: carries out the copies that a host cache has planned, before any other copy and any
// step. On a GPU they are enqueued in front of the step: it waits for them, and the host does not. Nor do they wait for
// the step before, if it has nothing to do with their blocks.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "../../runner.h"
#include "host_blocks.h"
#include "host_cache.h"

namespace stage8 {

class HostCacheRunner : public Runner {
 public:
  // The last blocks of the inner runner's host blocks are the host cache's.
  HostCacheRunner(std::unique_ptr<Runner> inner, std::shared_ptr<HostCache> host_cache);

  Runner& inner() { return *inner_; }
  const CacheSize& cache() const override { return size_; }  // without the host cache's blocks
  void copy_blocks(std::span<const BlockCopy> copies) override;
  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override { return inner_->wait(step); }
  bool is_asynchronous() const override { return inner_->is_asynchronous(); }
  void warm_up(int max_tokens, int max_sequences) override { inner_->warm_up(max_tokens, max_sequences); }

 private:
  // Those that have been allocated meanwhile are the host cache's.
  void find_new_blocks();
  // If one throws, it and the later ones stay planned.
  void copy_planned();
  // Copies that can be carried out in any order.
  void copy(std::span<const BlockCopy> copies);

  std::unique_ptr<Runner> inner_;
  HostBlocks* host_blocks_;  // the inner runner's, or nullptr: then all are there, and no step is computed meanwhile
  std::shared_ptr<HostCache> host_cache_;
  CacheSize size_;
  std::vector<int> last_blocks_;  // what the last step that was enqueued reads and writes; it may be computed still
};

}  // namespace
