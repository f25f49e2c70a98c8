#include "cpu_runner.h"

#include <cstddef>
#include <utility>

#include "common/base/check.h"

namespace stage8 {

CpuRunner::CpuRunner(const common::Llama& model, const KvCacheShape& shape, const std::string& reason)
    : model_(model),
      kv_cache_(shape),
      size_{shape.num_blocks, shape.block_size, shape.bytes_per_slot(), shape.num_host_blocks, reason} {}

StepId CpuRunner::enqueue(const RaggedBatch& batch) {
  RaggedBatch known = batch;
  known.resolve_pending(results_[last_.value % 2].tokens);
  const common::Matrix hidden = forward(known);
  StepResult result;
  const common::Matrix logits = model_.logits(hidden(batch.logits_rows, Eigen::all));
  result.tokens.resize(batch.logits_rows.size(), -1);
  result.logits.resize(batch.logits_rows.size());
  for (std::size_t row = 0; row < batch.logits_rows.size(); ++row) {
    const auto values = logits.row(static_cast<Eigen::Index>(row));
    if (batch.draws_token(row)) {
      result.tokens[row] = sampled_token(known, row, {values.data(), static_cast<std::size_t>(values.size())});
    } else {
      result.logits[row] = values;
    }
  }
  last_.value += 1;
  results_[last_.value % 2] = std::move(result);
  return last_;
}

common::Matrix CpuRunner::forward(const RaggedBatch& batch) {
  return model_.forward(batch.tokens, batch.positions,
                        [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
                          kv_cache_.write(layer, batch.slot_mapping, k, v);
                          if (on_layer_) {
                            on_layer_(layer);
                          }
                          return attention(kv_cache_, layer, q, batch);
                        });
}

StepResult CpuRunner::wait(StepId step) {
  COMMON_CHECK(step.value == last_.value || step.value + 1 == last_.value,
               "the results of the last two steps are kept");
  return results_[step.value % 2];
}

}  // namespace
