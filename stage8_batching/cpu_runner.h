// Computes steps on this machine's processor, as in all earlier stages.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "attention.h"
#include "common/model/llama.h"
#include "kv_cache.h"
#include "runner.h"

namespace stage8 {

class CpuRunner : public Runner {
 public:
  // The model must outlive the runner. reason: CacheSize's.
  CpuRunner(const common::Llama& model, const KvCacheShape& shape, const std::string& reason = "");

  const CacheSize& cache() const override { return size_; }
  void copy_blocks(std::span<const BlockCopy> copies) override { kv_cache_.copy_blocks(copies); }
  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;
  bool is_asynchronous() const override { return false; }

  // For tests. on_layer: called before the attention of each layer; if it throws, the step has failed.
  KvCache& kv_cache() { return kv_cache_; }
  void on_layer(std::function<void(int layer)> callback) { on_layer_ = std::move(callback); }

 protected:
  // Computes the tokens, all known, and stores their K and V. Returns the hidden states: [num_tokens, hidden_size].
  virtual common::Matrix forward(const RaggedBatch& batch);

  const common::Llama& model_;
  KvCache kv_cache_;
  CacheSize size_;
  std::array<StepResult, 2> results_;  // one for steps with even numbers, one for odd numbers
  StepId last_;
  std::function<void(int layer)> on_layer_;
};

}  // namespace
