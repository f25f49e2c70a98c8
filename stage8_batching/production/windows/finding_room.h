// What schedulers need to find room for sequences with windows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../../decoding.h"
#include "../../kv_cache_manager.h"

namespace stage8 {

// What a group without blocks computes first, in one sequence: all that its texts have in common, but no last token of
// several texts.
std::vector<common::Token> common_text(const SequenceGroup& group);

// The tokens of this text that are looked up in the prefix cache: at least one is left to compute. None if the group
// shares no blocks (SpeculatingScheduler::find_room()).
std::span<const common::Token> tokens_to_find(const SequenceGroup& group, std::span<const common::Token> text,
                                              const Admission& admission);

// How many blocks without an owner a sequence takes that begins with such blocks (FoundBlocks::blocks), for num_tokens
// tokens behind them.
int num_taken(const KvCacheManager& manager, std::span<const int> found, int num_tokens);

// Starts that sequence, whose blocks from the host are back, and counts no lookup. A block of its own stands in the
// places that are -1. Returns false and changes nothing if fewer than spare_blocks blocks would stay without an owner.
bool allocate_behind(KvCacheManager& manager, SequenceId sequence, std::span<const int> found, std::uint64_t salt,
                     int num_tokens, int spare_blocks);

}  // namespace
