// Attention in layers in which a query sees the last tokens only (Beltagy et al., arXiv 2004.05150).
#pragma once

#include "../../batch.h"
#include "../../kv_cache.h"
#include "common/base/tensor.h"

namespace stage8 {

// As attention() of batch.h, but the query at position p sees positions p - window + 1 to p. No slot before them is
// read.
common::Matrix windowed_attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                                  int window);

}  // namespace
