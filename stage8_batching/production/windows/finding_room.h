// What schedulers ask that find room for windows.
#pragma once

#include <vector>

#include "../../decoding.h"
#include "../../kv_cache_manager.h"

namespace stage8 {

// Blocks without an owner: free ones, and cached ones that can be evicted.
int num_available(const KvCacheManager& manager);

// What a group without blocks computes first, in one sequence: all that its texts have in common, but no last token of
// several texts.
std::vector<common::Token> common_text(const SequenceGroup& group);

}  // namespace
