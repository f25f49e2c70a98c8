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

// The part of it for one group, or for one sequence as a group without shared blocks. q, output: all rows of the step.
// window: if it is not 0, the query at position p sees positions p - window + 1 to p, and there are no shared blocks.
void attend_together(const KvCache& cache, int layer, const common::Matrix& q, const RaggedBatch& batch,
                     const common::SharedPrefix& group, common::Matrix& output, int window = 0);

}  // namespace
