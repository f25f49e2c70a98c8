#include "device_sampler.h"

namespace stage8 {

DeviceSampler::DeviceSampler(int vocab_size, int max_rows, common::Communicator* peers)
    : vocab_size_(vocab_size),
      peers_(peers),
      inputs_{{SamplingInputs(max_rows), SamplingInputs(max_rows)}},
      gathered_(peers == nullptr ? 0 : static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(vocab_size)),
      whole_logits_(gathered_.size()),
      sampler_(vocab_size, max_rows) {}

void DeviceSampler::upload(std::size_t which, const RaggedBatch& batch, const common::Stream& stream) {
  inputs_[which].upload(batch, stream);
}

void DeviceSampler::draw(std::size_t which, const DeviceStep& step, const common::Stream& stream) {
  common::SamplingBatch batch = inputs_[which].batch();
  if (batch.num_rows > 0) {
    batch.token_rows = step.token_rows;
    batch.tokens = step.tokens;
    batch.pending_rows = step.pending_rows;
    batch.pending_tokens = step.pending_tokens;
    sampler_.sample(peers_ == nullptr ? step.logits : gather(step.logits, batch.num_rows, stream), batch,
                    step.next_tokens, stream.get());
  }
}

float* DeviceSampler::gather(const float* own, int num_rows, const common::Stream& stream) {
  const auto count = static_cast<std::size_t>(peers_->shard().count);
  const std::size_t own_vocab_size = static_cast<std::size_t>(vocab_size_) / count;
  const std::size_t own_bytes = own_vocab_size * sizeof(float);
  const std::size_t own_size = static_cast<std::size_t>(num_rows) * own_vocab_size;
  peers_->gather(own, own_size, gathered_.data(), stream.get());
  for (std::size_t rank = 0; rank < count; ++rank) {
    CUDA_CHECK(cudaMemcpy2DAsync(whole_logits_.data() + rank * own_vocab_size, count * own_bytes,
                                 gathered_.data() + rank * own_size, own_bytes, own_bytes,
                                 static_cast<std::size_t>(num_rows), cudaMemcpyDeviceToDevice, stream.get()));
  }
  return whole_logits_.data();
}

}  // namespace
