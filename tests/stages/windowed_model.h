// A small model whose layers see the last tokens only, and a runner in which what no query may read is NaN.
#pragma once

#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "common/model/llama.h"
#include "tests/stages/serving_fixtures.h"

namespace tests {

inline constexpr int kWindowedContext = 160;

// global_period: as in LlamaConfig.
inline common::Llama windowed_model(int window, int global_period = 0) {
  common::LlamaConfig config = small_model().config();
  config.context_length = kWindowedContext;
  config.window = window;
  config.global_period = global_period;
  return {config, 1, common::Windows::kComputed};
}

// Before each step, fills with NaN what no sequence owns and no prompt may find, and the blocks that stand in the
// places of freed ones.
class PoisoningRunner : public stage::Runner {
 public:
  explicit PoisoningRunner(std::unique_ptr<stage::Runner> inner)
      : inner_(std::move(inner)), cpu_(dynamic_cast<stage::CpuRunner&>(*inner_)) {}

  void watch(const stage::KvCacheManager& manager) { manager_ = &manager; }
  int num_stand_ins() const { return num_stand_ins_; }  // seen so far, once for each step

  const stage::CacheSize& cache() const override { return inner_->cache(); }
  bool is_asynchronous() const override { return inner_->is_asynchronous(); }
  void copy_blocks(std::span<const stage::BlockCopy> copies) override { inner_->copy_blocks(copies); }
  stage::StepResult wait(stage::StepId step) override { return inner_->wait(step); }
  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    for (int block = 0; block < cache().num_blocks; ++block) {
      if (manager_->reference_count(block) == 0 && !manager_->prefix_cache().contains(block)) {
        poison(block);
      }
    }
    for (const int sequence : manager_->sequences()) {
      const std::vector<int>& table = manager_->block_table(sequence);
      if (table.size() > 1 && table[0] == table[1]) {
        poison(table[0]);
        ++num_stand_ins_;
      }
    }
    return inner_->enqueue(batch);
  }

 private:
  void poison(int block) {
    const stage::KvCacheShape& shape = cpu_.kv_cache().shape();
    std::vector<int> slots;
    for (int slot = 0; slot < shape.block_size; ++slot) {
      slots.push_back(block * shape.block_size + slot);
    }
    const common::Matrix nan = common::Matrix::Constant(shape.block_size, shape.num_kv_heads * shape.head_dim,
                                                        std::numeric_limits<float>::quiet_NaN());
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      cpu_.kv_cache().write(layer, slots, nan, nan);
    }
  }

  std::unique_ptr<stage::Runner> inner_;
  stage::CpuRunner& cpu_;
  const stage::KvCacheManager* manager_ = nullptr;
  int num_stand_ins_ = 0;
};

// An engine that frees what is behind the windows, around such a runner.
struct WindowedServing {
  WindowedServing(ServingOptions options, const common::Llama& model) : serving(wrapped(std::move(options)), model) {
    runner->watch(serving.engine_manager());
  }

  PoisoningRunner* runner = nullptr;
  Serving serving;

 private:
  ServingOptions wrapped(ServingOptions options) {
    options.speculates = true;
    options.has_windows = true;
    options.wrap = [this](std::unique_ptr<stage::Runner> inner) {
      auto poisoning = std::make_unique<PoisoningRunner>(std::move(inner));
      runner = poisoning.get();
      return poisoning;
    };
    return options;
  }
};

}  // namespace tests
