#include "shared_reading_cpu_runner.h"

#include "shared_attention.h"

namespace stage8 {
namespace {

// No partial result is written: a row goes on from the shared blocks to its own. So every shared block is a gain.
constexpr common::ReadingCosts kCosts{.block = 1};

}  // namespace

StepId SharedReadingCpuRunner::enqueue(const RaggedBatch& batch) {
  const StepId step = CpuRunner::enqueue(batch);
  count();
  return step;
}

common::Matrix SharedReadingCpuRunner::forward(const RaggedBatch& batch) {
  read_together(batch, groups_of(batch, batch.num_sequences(), cache().block_size, kCosts));
  if (groups().empty()) {
    return CpuRunner::forward(batch);
  }
  return model_.forward(batch.tokens, batch.positions,
                        [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
                          kv_cache_.write(layer, batch.slot_mapping, k, v);
                          if (on_layer_) {
                            on_layer_(layer);
                          }
                          return attention(kv_cache_, layer, q, batch, groups());
                        });
}

}  // namespace
