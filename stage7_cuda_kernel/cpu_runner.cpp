#include "cpu_runner.h"

#include <cstddef>
#include <utility>

#include "common/base/check.h"
#include "common/math/sampling.h"

namespace stage7 {

CpuRunner::CpuRunner(const common::Llama& model, const KvCacheShape& shape)
    : model_(model), kv_cache_(shape), size_{shape.num_blocks, shape.block_size, shape.bytes_per_slot()} {}

StepId CpuRunner::enqueue(const RaggedBatch& batch) {
  COMMON_CHECK(batch.num_sequences() == 1, "a step is of one sequence");
  const common::Matrix hidden =
      model_.forward(batch.tokens, batch.positions,
                     [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
                       kv_cache_.write(layer, batch.slot_mapping, k, v);
                       return attention(kv_cache_, layer, q, batch.block_tables, batch.context_lengths.front());
                     });
  StepResult result;
  const common::Matrix logits = model_.logits(hidden(batch.logits_rows, Eigen::all));
  if (batch.draws_tokens) {
    for (Eigen::Index row = 0; row < logits.rows(); ++row) {
      result.tokens.push_back(common::argmax({logits.row(row).data(), static_cast<std::size_t>(logits.cols())}));
    }
  } else {
    result.logits = logits;
  }
  result_ = std::move(result);
  last_.value += 1;
  return last_;
}

StepResult CpuRunner::wait(StepId step) {
  COMMON_CHECK(step.value == last_.value, "the result of the last step is kept");
  return result_;
}

}  // namespace
