// Computes steps on this machine's processor, as in all earlier stages.
#pragma once

#include <span>

#include "attention.h"
#include "common/model/llama.h"
#include "kv_cache.h"
#include "runner.h"

namespace stage7 {

class CpuRunner : public Runner {
 public:
  // The model must outlive the runner.
  CpuRunner(const common::Llama& model, const KvCacheShape& shape);

  const CacheSize& cache() const override { return size_; }
  void copy_blocks(std::span<const BlockCopy> copies) override { kv_cache_.copy_blocks(copies); }
  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;

  // For tests.
  KvCache& kv_cache() { return kv_cache_; }

 private:
  const common::Llama& model_;
  KvCache kv_cache_;
  CacheSize size_;
  StepResult result_;  // of the last step
  StepId last_;
};

}  // namespace
