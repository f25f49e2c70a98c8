#include "shared_reading_cpu_runner.h"

#include <vector>

#include "shared_attention.h"

namespace stage8 {
namespace {

// No partial result is written: a row goes on from the shared blocks to its own. So every shared block is a gain.
constexpr common::ReadingCosts kCosts{.block = 1};

}  // namespace

common::Matrix SharedReadingCpuRunner::forward(const RaggedBatch& batch) {
  const std::vector<common::SharedPrefix> groups = groups_of(batch, cache().block_size, kCosts);
  if (groups.empty()) {
    return CpuRunner::forward(batch);
  }
  common::Matrix hidden =
      model_.forward(batch.tokens, batch.positions,
                     [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
                       kv_cache_.write(layer, batch.slot_mapping, k, v);
                       if (on_layer_) {
                         on_layer_(layer);
                       }
                       return attention(kv_cache_, layer, q, batch, groups);
                     });
  count(groups);
  return hidden;
}

}  // namespace
