#include "scoring_cpu_runner.h"

#include <vector>

#include "../windows/windowed_attention.h"
#include "common/base/check.h"
#include "common/model/scored_rows.h"

namespace stage8 {

std::shared_ptr<LocalPool> ScoringCpuRunner::separate_windows(const NumParts& parts_with, int num_blocks) {
  num_blocks = num_blocks > 0 ? num_blocks : size_.num_blocks;
  const int num_parts = parts_with(num_blocks);
  if (num_parts >= num_blocks) {
    return nullptr;
  }
  COMMON_CHECK(last_.value == 0 && local_pool_ == nullptr, "the cache holds nothing yet");
  const common::LlamaConfig& config = model_.config();
  size_.num_blocks = num_blocks;
  KvCacheShape global = kv_cache_.shape();
  global.num_blocks = num_blocks;
  KvCacheShape local = global;
  global.num_layers = 0;
  local.num_layers = 0;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    layer_in_cache_.push_back(config.window_of(layer) > 0 ? local.num_layers++ : global.num_layers++);
  }
  // The smallest parts are used first, and memory that is not written to is not taken.
  kv_cache_ = KvCache(global);  // frees what the runner had
  local_cache_.emplace(local);
  local_pool_ = std::make_shared<LocalPool>(
      LocalPoolSize{num_parts, local.num_blocks, local.num_host_blocks, local.block_size, config.window});
  return local_pool_;
}

void ScoringCpuRunner::copy_blocks(std::span<const BlockCopy> copies) {
  copy_parts();
  SharedReadingCpuRunner::copy_blocks(copies);
}

common::Matrix ScoringCpuRunner::forward(const RaggedBatch& batch) {
  const std::vector<common::ScoredRow> rows = take_rows();
  common::Matrix hidden =
      model_.config().has_windows() ? windowed_forward(batch) : SharedReadingCpuRunner::forward(batch);
  common::score_rows(model_, hidden, rows);
  return hidden;
}

common::Matrix ScoringCpuRunner::windowed_forward(const RaggedBatch& batch) {
  copy_parts();
  const RaggedBatch local_batch = local_pool_ != nullptr ? with_parts(batch) : RaggedBatch();
  return model_.forward(
      batch.tokens, batch.positions,
      [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
        const int window = model_.config().window_of(layer);
        const bool is_local = local_pool_ != nullptr && window > 0;
        const RaggedBatch& own = is_local ? local_batch : batch;
        KvCache& cache = is_local ? *local_cache_ : kv_cache_;
        const int row = layer_in_cache_.empty() ? layer : layer_in_cache_[static_cast<std::size_t>(layer)];
        cache.write(row, own.slot_mapping, k, v);
        if (on_layer_) {
          on_layer_(layer);
        }
        return window > 0 ? windowed_attention(cache, row, q, own, window) : attention(cache, row, q, own);
      });
}

RaggedBatch ScoringCpuRunner::with_parts(const RaggedBatch& batch) const {
  const int block_size = cache().block_size;
  RaggedBatch result = batch;
  for (int& block : result.block_tables) {
    block = local_pool_->part_of(block);
  }
  for (int& slot : result.slot_mapping) {
    slot = slot < 0 ? slot : local_pool_->part_of(slot / block_size) * block_size + slot % block_size;
  }
  return result;
}

void ScoringCpuRunner::copy_parts() {
  if (local_pool_ != nullptr) {
    local_cache_->copy_blocks(local_pool_->pending_copies());
    local_pool_->clear_pending_copies();
  }
}

}  // namespace
