#include "windowed_attention.h"

#include "../cpu/shared_attention.h"
#include "common/base/check.h"

namespace stage8 {

common::Matrix windowed_attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                                  int window) {
  COMMON_CHECK(window > 0, "a query sees its own token");
  COMMON_CHECK(q.rows() == batch.num_tokens(), "the batch has one query for each token");
  common::Matrix output(q.rows(), q.cols());
  for (int sequence = 0; sequence < static_cast<int>(batch.num_sequences()); ++sequence) {
    attend_together(cache, layer, q, batch, {.sequences = {sequence}, .num_blocks = 0}, output, window);
  }
  return output;
}

}  // namespace
