// Swapping: the part of the manager that moves sequences between the cache and the processor's memory, in integers. A
// copy out of the cache is planned before the block is given back, and the copies are carried out in the order in which
// they were planned: whoever gets the block next writes to it later.
#include <algorithm>
#include <map>

#include "common/base/check.h"
#include "kv_cache_manager.h"

namespace stage8 {

bool KvCacheManager::swap_out(std::span<const SequenceId> sequences) {
  if (holding(sequences).reserved > host_blocks_.num_free() * block_size_) {
    return false;
  }
  std::map<int, int> moved;  // from a block to its place in the processor's memory
  for (const SequenceId id : sequences) {
    Sequence& sequence = find(id);
    // From the end, as in free(): what others may find by its tokens is evicted in that order. Blocks reserved ahead
    // hold nothing that is worth a copy.
    for (std::size_t i = sequence.block_table.size(); i-- > 0;) {
      int& block = sequence.block_table[i];
      const int source = block;
      if (static_cast<int>(i) * block_size_ >= sequence.length) {
        sequence.block_table.pop_back();
      } else {
        if (const auto [place, is_new] = moved.emplace(source, 0); is_new) {
          place->second = host_blocks_.take(prefix_cache_.contains(source) ? prefix_cache_.tokens(source)
                                                                           : std::vector<common::Token>());
          pending_copies_.push_back({source, place->second});
        }
        block = moved.at(source);
        host_blocks_.add_owner(block);
      }
      release_block(source);
    }
    swapped_.insert(sequences_.extract(id));
  }
  return true;
}

bool KvCacheManager::swap_in(std::span<const SequenceId> sequences, int spare_blocks) {
  if (holding(sequences).reserved > (num_available() - spare_blocks) * block_size_) {
    return false;
  }
  std::map<int, int> moved;
  for (const SequenceId id : sequences) {
    Sequence& sequence = swapped_.at(id);
    for (std::size_t i = 0; i < sequence.block_table.size(); ++i) {
      int& block = sequence.block_table[i];
      const int source = block;
      if (const auto [place, is_new] = moved.emplace(source, 0); is_new) {
        place->second = take_block();
        pending_copies_.push_back({source, place->second});
        reference_counts_[static_cast<std::size_t>(place->second)] = 0;
      }
      block = moved.at(source);
      reference_counts_[static_cast<std::size_t>(block)] += 1;
      // Its text can be found again, if that of the blocks before it can.
      const std::vector<common::Token>& published = host_blocks_.published(source);
      if (!published.empty() && !prefix_cache_.contains(block)) {
        prefix_cache_.publish(block, i == 0 ? -1 : sequence.block_table[i - 1], published, sequence.salt);
      }
      host_blocks_.remove_owner(source);
    }
    sequences_.insert(swapped_.extract(id));
  }
  return true;
}

Usage KvCacheManager::holding(std::span<const SequenceId> sequences) const {
  std::map<int, int> used;  // slots that hold a token, by block
  for (const SequenceId id : sequences) {
    const Sequence& sequence = is_swapped(id) ? swapped_.at(id) : find(id);
    for (std::size_t i = 0; i < sequence.block_table.size(); ++i) {
      const int rest = sequence.length - static_cast<int>(i) * block_size_;
      if (rest > 0) {
        used[sequence.block_table[i]] = std::min(rest, block_size_);
      }
    }
  }
  Usage usage;
  usage.total = num_blocks_ * block_size_;
  usage.reserved = static_cast<int>(used.size()) * block_size_;
  for (const auto& [block, count] : used) {
    usage.used += count;
  }
  return usage;
}

void KvCacheManager::free_swapped(SequenceId sequence) {
  for (const int block : swapped_.at(sequence).block_table) {
    host_blocks_.remove_owner(block);
  }
  swapped_.erase(sequence);
}

}  // namespace
