#include "step_sampler.h"

#include <algorithm>
#include <span>
#include <vector>

#include "common/base/check.h"
#include "common/base/tensor.h"

namespace stage8 {

void HostSampler::upload(std::size_t which, const RaggedBatch& batch, const common::Stream& /*stream*/) {
  const auto is_drawn = [](const SamplingRow& row) { return row.draws_token && !common::is_greedy(row.options); };
  const std::vector<SamplingRow>& rows = batch.sampling_rows;
  batches_[which] = std::any_of(rows.begin(), rows.end(), is_drawn) ? batch : RaggedBatch{};
}

void HostSampler::draw(std::size_t which, const DeviceStep& step, const common::Stream& stream) {
  RaggedBatch& batch = batches_[which];
  if (batch.sampling_rows.empty()) {
    return;
  }
  const auto copy = [&](void* destination, const void* source, std::size_t count) {  // numbers of 4 bytes
    CUDA_CHECK(cudaMemcpyAsync(destination, source, 4 * count, cudaMemcpyDefault, stream.get()));
  };
  const std::size_t num_rows = batch.logits_rows.size();
  common::Matrix logits(static_cast<Eigen::Index>(num_rows), vocab_size_);
  std::vector<common::Token> tokens(num_rows);
  int num_pending = 0;
  for (const PendingToken& pending : batch.pending_tokens) {
    num_pending = std::max(num_pending, pending.row + 1);
  }
  std::vector<common::Token> previous(static_cast<std::size_t>(num_pending));
  copy(logits.data(), step.logits, static_cast<std::size_t>(logits.size()));
  copy(tokens.data(), step.next_tokens, num_rows);
  copy(previous.data(), step.pending_tokens, previous.size());
  stream.synchronize();
  batch.resolve_pending(previous);
  for (std::size_t row = 0; row < num_rows; ++row) {
    try {
      const float* const begin = logits.row(static_cast<Eigen::Index>(row)).data();
      tokens[row] = sampled_token(batch, row, {begin, static_cast<std::size_t>(vocab_size_)});
    } catch (const common::InputError&) {  // a logit is no number, or infinite
      tokens[row] = -1;
    }
  }
  copy(step.next_tokens, tokens.data(), num_rows);
  stream.synchronize();
}

}  // namespace
