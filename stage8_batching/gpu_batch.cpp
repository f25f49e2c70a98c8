// A ragged batch on a runner that takes one sequence at a time: the text is right, and the weights are read once a
// sequence.
#include <algorithm>

#include "gpu_runner.h"

namespace stage8 {

void GpuRunner::forward_batch(const RaggedBatch& batch) {
  batch_logits_.clear();
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    const auto first = static_cast<std::size_t>(batch.query_starts[i]);
    const auto count = static_cast<std::size_t>(batch.num_queries(i));
    forward(batch.tokens_of(i), std::span(batch.positions).subspan(first, count),
            std::span(batch.slot_mapping).subspan(first, count), batch.block_table(i));
    const bool is_wanted =
        std::binary_search(batch.logits_rows.begin(), batch.logits_rows.end(), batch.query_starts[i + 1] - 1);
    if (is_wanted && batch.num_sequences() > 1) {  // of a single one, they may not be needed: the largest will do
      batch_logits_.push_back(logits());
    }
  }
}

common::Matrix GpuRunner::batch_logits() {
  if (batch_logits_.empty()) {
    return logits();
  }
  common::Matrix result(static_cast<Eigen::Index>(batch_logits_.size()), batch_logits_.front().cols());
  for (std::size_t i = 0; i < batch_logits_.size(); ++i) {
    result.row(static_cast<Eigen::Index>(i)) = batch_logits_[i];
  }
  return result;
}

}  // namespace
