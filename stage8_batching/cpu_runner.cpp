#include "cpu_runner.h"

#include <cstddef>
#include <utility>

#include "common/base/check.h"

namespace stage8 {

CpuRunner::CpuRunner(const common::Llama& model, const KvCacheShape& shape, const std::string& reason)
    : model_(model),
      kv_cache_(shape),
      size_{shape.num_blocks, shape.block_size, shape.bytes_per_slot(), shape.num_host_blocks, reason} {}

void CpuRunner::enqueue(const RaggedBatch& batch) {
  RaggedBatch known = batch;
  known.resolve_pending(results_[last_].tokens);
  const common::Matrix hidden =
      model_.forward(known.tokens, batch.positions,
                     [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
                       kv_cache_.write(layer, batch.slot_mapping, k, v);
                       if (on_layer_) {
                         on_layer_(layer);
                       }
                       return attention(kv_cache_, layer, q, batch);
                     });
  StepResult result;
  const common::Matrix logits = model_.logits(hidden(batch.logits_rows, Eigen::all));
  if (batch.draws_tokens) {
    for (Eigen::Index row = 0; row < logits.rows(); ++row) {
      result.tokens.push_back(sampled_token(known, static_cast<std::size_t>(row),
                                            {logits.row(row).data(), static_cast<std::size_t>(logits.cols())}));
    }
  } else {
    result.logits = logits;
  }
  last_ = 1 - last_;
  results_[last_] = std::move(result);
}

StepResult CpuRunner::wait(int step_age) {
  COMMON_CHECK(step_age == 0 || step_age == 1, "what the last two steps have drawn is kept");
  return results_[(last_ + static_cast<std::size_t>(step_age)) % 2];
}

}  // namespace
