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
  last_.value += 1;
  results_[last_.value % 2] = std::move(result);
  return last_;
}

StepResult CpuRunner::wait(StepId step) {
  COMMON_CHECK(step.value == last_.value || step.value + 1 == last_.value,
               "the results of the last two steps are kept");
  return results_[step.value % 2];
}

}  // namespace
