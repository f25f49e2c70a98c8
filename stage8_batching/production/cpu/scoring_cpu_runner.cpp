#include "scoring_cpu_runner.h"

#include <vector>

#include "../windows/windowed_attention.h"
#include "common/model/scored_rows.h"

namespace stage8 {

common::Matrix ScoringCpuRunner::forward(const RaggedBatch& batch) {
  const std::vector<common::ScoredRow> rows = take_rows();
  common::Matrix hidden =
      model_.config().has_windows() ? windowed_forward(batch) : SharedReadingCpuRunner::forward(batch);
  common::score_rows(model_, hidden, rows);
  return hidden;
}

common::Matrix ScoringCpuRunner::windowed_forward(const RaggedBatch& batch) {
  return model_.forward(batch.tokens, batch.positions,
                        [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
                          kv_cache_.write(layer, batch.slot_mapping, k, v);
                          if (on_layer_) {
                            on_layer_(layer);
                          }
                          const int window = model_.config().window_of(layer);
                          return window > 0 ? windowed_attention(kv_cache_, layer, q, batch, window)
                                            : attention(kv_cache_, layer, q, batch);
                        });
}

}  // namespace
