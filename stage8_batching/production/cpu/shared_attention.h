// Attention that reads the blocks which several sequences begin with once.
#pragma once

#include <span>

#include "../../batch.h"
#include "../../kv_cache.h"
#include "common/base/tensor.h"
#include "common/paged/shared_reading.h"

namespace stage8 {

// As attention() in ../../batch.h, bit by bit, in another order of blocks: all sequences of a group add a shared block
// before the next one is read. Then each goes on with blocks of its own: what online softmax (stage 3) keeps about the
// blocks so far is all that it needs.
common::Matrix attention(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                         std::span<const common::SharedPrefix> groups);

}  // namespace
