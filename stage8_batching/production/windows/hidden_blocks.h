// Blocks that no query will see again, because every layer has the same window: they are freed while their sequence
// is live.
//
// The table keeps their places, so that positions stay what they are. One block, which is never written to nor
// published, stands in all of them:
//
//   block_size 4, window 6, 13 tokens: the next query sees positions 8 … 13
//   [7, 1, 3, 5] becomes [2, 2, 3, 5], and 7 and 1 are free or cached
#pragma once

#include "../../kv_cache_manager.h"

namespace stage8 {

// How many blocks of a table no query sees once `length` tokens are in the cache. The last full block is never one of
// them: the next block that is published follows it.
int num_hidden_blocks(int length, int window, int block_size);

// Frees these blocks of the sequence. num_unpublished: how many of the last tokens may be in a step in flight, whose
// blocks are published when it is collected. stand_in: the block that stands in for another sequence of the same
// request, or -1. Sequences that share blocks share it too: a new one for each could take more than it frees, and more
// than was set aside for the request. For a new one, there must be two blocks to free, and one without an owner;
// otherwise nothing changes. Returns the block to pass on.
int free_hidden_blocks(KvCacheManager& manager, SequenceId sequence, int window, int num_unpublished = 0,
                       int stand_in = -1);

}  // namespace
