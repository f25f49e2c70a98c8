// A small model whose layers see the last tokens only, and a runner in which what no query may read is NaN.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/parallel.h"
#include "common/model/llama.h"
#include "tests/stages/fake_runner.h"
#include "tests/stages/serving_fixtures.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/cpu/scoring_cpu_runner.h)
#include STAGE_HEADER(production/windows/local_pool.h)
#include STAGE_HEADER(production/windows/window_prompt_scheduler.h)
// clang-format on

namespace tests {

inline constexpr int kWindowedContext = 160;

// global_period: as in LlamaConfig. From now on, passes compute on one thread: several would wait for each other longer
// than they compute.
inline common::Llama windowed_model(int window, int global_period = 0) {
  common::set_num_threads(1);
  common::LlamaConfig config = small_model().config();
  config.context_length = kWindowedContext;
  config.window = window;
  config.global_period = global_period;
  return {config, 1, common::Windows::kComputed};
}

// The rules of the layers with a window that have a pool of their own (WINDOWS.md, invariants 5 and 6), after a step.
// Empty if they hold.
inline std::string check_parts(const stage::LocalPool& pool, const stage::KvCacheManager& manager) {
  const stage::LocalPoolSize& size = pool.size();
  std::vector<std::vector<int>> blocks(static_cast<std::size_t>(size.num_blocks));  // by part
  for (int block = 0; block < size.num_blocks; ++block) {
    if (const int part = pool.part_of(block); part >= 0) {
      blocks.at(static_cast<std::size_t>(part)).push_back(block);
    }
  }
  int num_used = 0;
  for (int part = 0; part < size.num_parts; ++part) {
    const std::vector<int>& users = blocks[static_cast<std::size_t>(part)];
    num_used += users.empty() ? 0 : 1;
    if (users.empty() != pool.is_free(part)) {
      return common::format("part %d has %zu blocks, and is%s free", part, users.size(),
                            pool.is_free(part) ? "" : " not");
    }
    const stage::PrefixCache& cache = manager.prefix_cache();
    for (std::size_t i = 1; i < users.size(); ++i) {
      // One of them may have been freed since, and be given another text before it has another part.
      const bool both_count = manager.reference_count(users[i]) > 0 && manager.reference_count(users[0]) > 0;
      if (both_count && !(cache.contains(users[i]) && cache.contains(users[0]) &&
                          cache.entry(users[i]).text == cache.entry(users[0]).text)) {
        return common::format("blocks %d and %d have different texts and the same part", users[0], users[i]);
      }
    }
  }
  if (num_used != pool.num_held() + pool.num_cached()) {
    return common::format("%d parts are used, %d held and %d cached", num_used, pool.num_held(), pool.num_cached());
  }
  for (const int sequence : manager.sequences()) {
    const int length = manager.length(sequence);
    for (int position = std::max(0, length + 1 - size.window); position < length; ++position) {
      const int block = manager.block_table(sequence)[static_cast<std::size_t>(position / size.block_size)];
      if (pool.part_of(block) < 0) {
        return common::format("the next query of sequence %d sees position %d, in a block without a part", sequence,
                              position);
      }
    }
  }
  return "";
}

// Whether the windows of all its sequences may not fit into the pool that layers with a window have.
inline bool is_too_wide(const stage::LocalPool* pool, const stage::GenerationRequest& task, int block_size) {
  return pool != nullptr && std::min(task.num_samples * stage::max_blocks_of_window(pool->size().window, block_size),
                                     stage::max_slots_of(task.request, task.num_samples, block_size) / block_size) >
                                pool->size().num_parts;
}

// A runner around another one. Before each step, those derived from it fill with NaN what no query may read.
class RunnerAround : public stage::Runner, public stage::SeparateWindows {
 public:
  const stage::CacheSize& cache() const override { return inner_->cache(); }
  bool is_asynchronous() const override { return inner_->is_asynchronous(); }
  void copy_blocks(std::span<const stage::BlockCopy> copies) override { inner_->copy_blocks(copies); }
  stage::StepResult wait(stage::StepId step) override { return inner_->wait(step); }

  // Null if all layers are in one pool.
  const stage::LocalPool* local_pool() const { return local_pool_.get(); }
  int num_stand_ins() const { return num_stand_ins_; }  // seen so far, once for each sequence and step

 protected:
  explicit RunnerAround(std::unique_ptr<stage::Runner> inner) : inner_(std::move(inner)) {}

  // What no sequence owns and no prompt may find, and the blocks that stand in the places of freed ones.
  std::set<int> unreadable_blocks(const stage::KvCacheManager& manager) {
    std::set<int> blocks;
    for (int block = 0; block < cache().num_blocks; ++block) {
      if (manager.reference_count(block) == 0 && !manager.prefix_cache().contains(block)) {
        blocks.insert(block);
      }
    }
    for (const int sequence : manager.sequences()) {
      const std::vector<int>& table = manager.block_table(sequence);
      if (table.size() > 1 && table[0] == table[1]) {
        blocks.insert(table[0]);
        ++num_stand_ins_;
      }
    }
    return blocks;
  }
  // None while one that is free may still be copied.
  std::vector<int> free_parts() const {
    std::vector<int> parts;
    for (int part = 0;
         local_pool_ != nullptr && local_pool_->pending_copies().empty() && part < local_pool_->size().num_parts;
         ++part) {
      if (local_pool_->is_free(part)) {
        parts.push_back(part);
      }
    }
    return parts;
  }

  std::unique_ptr<stage::Runner> inner_;
  std::shared_ptr<stage::LocalPool> local_pool_;

 private:
  int num_stand_ins_ = 0;
};

// Also fills with NaN the parts that host blocks do not have.
class PoisoningRunner : public RunnerAround {
 public:
  // num_parts: of the layers with a window, if others see all; 0: as many as the engine says.
  PoisoningRunner(std::unique_ptr<stage::Runner> inner, int num_parts)
      : RunnerAround(std::move(inner)), cpu_(dynamic_cast<stage::ScoringCpuRunner&>(*inner_)), num_parts_(num_parts) {}

  std::shared_ptr<stage::LocalPool> separate_windows(const NumParts& num_parts, int num_blocks) override {
    local_pool_ =
        cpu_.separate_windows([&](int count) { return num_parts_ > 0 ? num_parts_ : num_parts(count); }, num_blocks);
    if (local_pool_ != nullptr) {
      cpu_.local_cache().fill(std::numeric_limits<float>::quiet_NaN());
      cpu_.kv_cache().fill(std::numeric_limits<float>::quiet_NaN());
    }
    return local_pool_;
  }
  stage::ScoringCpuRunner& cpu() { return cpu_; }
  // The next `count` calls that copy something throw, before they do anything or after they have done everything.
  void fail_copies(int count, bool is_done) { faults_ = {count, is_done}; }
  int max_held() const { return max_held_; }  // parts, in all steps so far

  void watch(const stage::KvCacheManager& manager) { manager_ = &manager; }

  void copy_blocks(std::span<const stage::BlockCopy> copies) override {
    const bool fails = !copies.empty() && faults_.first > 0;
    faults_.first -= fails ? 1 : 0;
    if (!fails || faults_.second) {
      inner_->copy_blocks(copies);
    }
    if (fails) {
      throw RunnerFault();
    }
  }
  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    max_held_ = std::max(max_held_, local_pool_ != nullptr ? local_pool_->num_held() : 0);
    for (const int block : unreadable_blocks(*manager_)) {
      poison(cpu_.kv_cache(), block);
    }
    poison_parts();
    return inner_->enqueue(batch);
  }

 private:
  void poison_parts() {
    if (local_pool_ == nullptr || !local_pool_->pending_copies().empty()) {
      return;
    }
    for (const int part : free_parts()) {
      poison(cpu_.local_cache(), part);
    }
    const stage::LocalPoolSize& size = local_pool_->size();
    poison(cpu_.local_cache(), size.num_parts);  // the cache has room behind the last part
    for (int block = size.num_blocks; block < size.num_blocks + size.num_host_blocks; ++block) {
      if (local_pool_->part_of(block) < 0) {
        const stage::BlockCopy copy = {size.num_parts, block};
        cpu_.local_cache().copy_blocks({&copy, 1});
      }
    }
  }

  static void poison(stage::KvCache& cache, int block) {
    const stage::KvCacheShape& shape = cache.shape();
    std::vector<int> slots;
    for (int slot = 0; slot < shape.block_size; ++slot) {
      slots.push_back(block * shape.block_size + slot);
    }
    const common::Matrix nan = common::Matrix::Constant(shape.block_size, shape.num_kv_heads * shape.head_dim,
                                                        std::numeric_limits<float>::quiet_NaN());
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      cache.write(layer, slots, nan, nan);
    }
  }

  stage::ScoringCpuRunner& cpu_;
  int num_parts_;
  const stage::KvCacheManager* manager_ = nullptr;
  int max_held_ = 0;
  std::pair<int, bool> faults_;  // how many, and whether they come when everything is done
};

// An engine that frees what is behind the windows, around such a runner. num_parts: the runner's.
struct WindowedServing {
  WindowedServing(ServingOptions options, const common::Llama& model, int num_parts = 0)
      : serving(wrapped(std::move(options), num_parts), model) {
    runner->watch(serving.engine_manager());
  }

  // As Serving's, of both pools.
  std::string problem() const {
    std::string found = serving.problem();
    return found.empty() && runner->local_pool() != nullptr
               ? check_parts(*runner->local_pool(), serving.engine_manager())
               : found;
  }

  PoisoningRunner* runner = nullptr;
  Serving serving;

 private:
  ServingOptions wrapped(ServingOptions options, int num_parts) {
    options.speculates = true;
    options.has_windows = true;
    options.wrap = wrap_in(runner, num_parts);
    return options;
  }
};

}  // namespace tests
