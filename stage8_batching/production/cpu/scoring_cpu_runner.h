// A runner on the CPU that also scores rows of a step, piece by piece, from the hidden states of its pass, and that
// computes layers with windows (../windows/windowed_attention.h): there, every sequence reads alone. They can have a
// cache of their own (../windows/local_pool.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "../scoring/row_scoring.h"
#include "../windows/local_pool.h"
#include "shared_reading_cpu_runner.h"

namespace stage8 {

class ScoringCpuRunner : public SharedReadingCpuRunner, public RowScoring, public SeparateWindows {
 public:
  using SharedReadingCpuRunner::SharedReadingCpuRunner;

  std::shared_ptr<LocalPool> separate_windows(const NumParts& parts_with, int num_blocks) override;
  void copy_blocks(std::span<const BlockCopy> copies) override;

  // For tests: the cache of the layers with a window, by part. Only if they are separate.
  KvCache& local_cache() { return *local_cache_; }

 protected:
  common::Matrix forward(const RaggedBatch& batch) override;

 private:
  // As CpuRunner::forward(), with the model's windows.
  common::Matrix windowed_forward(const RaggedBatch& batch);
  // The batch with parts in the places of blocks; -1: the block has none.
  RaggedBatch with_parts(const RaggedBatch& batch) const;
  void copy_parts();

  // Of layers with a window that are separate. The other ones' cache is kv_cache_.
  std::shared_ptr<LocalPool> local_pool_;  // shared with the scheduler; null if they are not separate
  std::optional<KvCache> local_cache_;
  std::vector<int> layer_in_cache_;  // by layer of the model: its number in its cache
};

}  // namespace
