// The books of a manager of blocks, read and checked. For every stage from the second on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "common/base/text.h"
#include "tests/support/stage_api.h"

namespace tests {

// Everything that a manager says about itself: two equal snapshots mean that nothing has changed.
struct Snapshot {
  struct Sequence {
    std::vector<int> block_table;
    int length = 0;
    int capacity = 0;
    bool operator==(const Sequence&) const = default;
  };

  std::vector<int> free_blocks;
  std::map<int, Sequence> sequences;
  std::vector<int> reference_counts;  // by block; from stage 5 on
  std::vector<int> cached_blocks;     // without an owner, and kept; from stage 6 on
  bool operator==(const Snapshot&) const = default;
};

inline Snapshot take_snapshot(const stage::KvCacheManager& manager) {
  Snapshot snapshot;
  snapshot.free_blocks = manager.free_blocks();
  for (const int sequence : manager.sequences()) {
    snapshot.sequences[sequence] = {manager.block_table(sequence), manager.length(sequence),
                                    manager.capacity(sequence)};
  }
#if STAGE_NUMBER >= 5
  for (int block = 0; block * manager.block_size() < manager.usage().total; ++block) {
    snapshot.reference_counts.push_back(manager.reference_count(block));
  }
#endif
#if STAGE_NUMBER >= 6
  const auto& evictable = manager.prefix_cache().evictable();
  snapshot.cached_blocks.assign(evictable.begin(), evictable.end());
#endif
  return snapshot;
}

inline std::string to_string(const std::vector<int>& numbers) {
  std::string result = "[";
  for (const int number : numbers) {
    result += (result.size() == 1 ? "" : ", ") + std::to_string(number);
  }
  return result + "]";
}

inline std::string to_string(const Snapshot& snapshot) {
  std::string result = "free " + to_string(snapshot.free_blocks);
  for (const auto& [id, sequence] : snapshot.sequences) {
    result += common::format("; %d holds %d in ", id, sequence.length) + to_string(sequence.block_table);
  }
  if (!snapshot.reference_counts.empty()) {
    result += "; owners " + to_string(snapshot.reference_counts);
  }
  if (!snapshot.cached_blocks.empty()) {
    result += "; cached " + to_string(snapshot.cached_blocks);
  }
  return result;
}

// What a failed comparison of two snapshots prints.
inline std::ostream& operator<<(std::ostream& out, const Snapshot& snapshot) { return out << to_string(snapshot); }

// The parts of check_ledger() below; each returns a problem, or nothing.
inline std::string check_lengths(const Snapshot& snapshot, int block_size) {
  for (const auto& [id, sequence] : snapshot.sequences) {
    const auto capacity = static_cast<int>(sequence.block_table.size()) * block_size;
    if (sequence.length < 0 || sequence.length > capacity || sequence.capacity != capacity) {
      return common::format("sequence %d has %d tokens in %zu blocks of %d and a capacity of %d: ", id, sequence.length,
                            sequence.block_table.size(), block_size, sequence.capacity);
    }
  }
  return "";
}

// Up to stage 4, a block has one owner or is free. From stage 5 on, it is on the free list once and in no table, or in
// as many tables as its reference count says, once in each (stage 5, invariant 1). From stage 6 on, the cached blocks
// are a second free list.
inline std::string check_owners(const Snapshot& snapshot, int num_blocks, bool has_windows) {
  std::vector<int> owners(static_cast<std::size_t>(num_blocks), 0);
  std::vector<int> times_free = owners;
  bool outside = false;
  const auto count = [&](const std::vector<int>& blocks, std::vector<int>& counts) {
    for (const int block : blocks) {
      if (block < 0 || block >= num_blocks) {
        outside = true;
      } else {
        counts[static_cast<std::size_t>(block)] += 1;
      }
    }
  };
  count(snapshot.free_blocks, times_free);
  count(snapshot.cached_blocks, times_free);
  for (const auto& [id, sequence] : snapshot.sequences) {
    count(sequence.block_table, owners);
    std::vector<int> table = sequence.block_table;
    if (has_windows) {  // a block stands in the places of freed ones, all at the beginning
      table.erase(table.begin(), std::adjacent_find(table.begin(), table.end(), std::not_equal_to<>()));
    }
    std::sort(table.begin(), table.end());
    if (std::adjacent_find(table.begin(), table.end()) != table.end()) {
      return common::format("the block table of sequence %d names a block twice: ", id);
    }
  }
  if (outside) {
    return common::format("a block is named that is none of the %d: ", num_blocks);
  }
  for (std::size_t block = 0; block < owners.size(); ++block) {
    if (owners[block] == 0 && times_free[block] == 0) {
      return common::format("block %zu is lost: no sequence has it, and it is not free: ", block);
    }
    if (times_free[block] > 1) {
      return common::format("block %zu is free %d times over: was it freed twice? ", block, times_free[block]);
    }
    if (owners[block] > 0 && times_free[block] > 0) {
      return common::format("block %zu is free, and has %d %s: ", block, owners[block],
                            owners[block] == 1 ? "owner" : "owners");
    }
    const int counted = STAGE_NUMBER >= 5 ? snapshot.reference_counts[block] : 1;
    if (owners[block] > counted || (STAGE_NUMBER >= 5 && owners[block] != counted)) {
      return common::format("block %zu has %d %s, and %d %s: ", block, owners[block],
                            owners[block] == 1 ? "owner" : "owners", counted,
                            STAGE_NUMBER < 5 ? "is allowed"
                            : counted == 1   ? "is counted"
                                             : "are counted");
    }
  }
  return "";
}

// usage() counts a block once, however many sequences read it, and of its slots the longest owner's.
inline std::string check_usage(const Snapshot& snapshot, const stage::Usage& usage, int num_blocks, int block_size) {
  std::map<int, int> used_slots;  // by block
  for (const auto& [id, sequence] : snapshot.sequences) {
    int rest = sequence.length;
    for (const int block : sequence.block_table) {
      used_slots[block] = std::max(used_slots[block], std::min(rest, block_size));
      rest -= std::min(rest, block_size);
    }
  }
  const auto reserved = static_cast<int>(used_slots.size()) * block_size;
  int used = 0;
  for (const auto& [block, slots] : used_slots) {
    used += slots;
  }
  if (usage.total != num_blocks * block_size || usage.reserved != reserved || usage.used != used) {
    return common::format("usage() says %d of %d slots reserved and %d used, and it is %d of %d and %d: ",
                          usage.reserved, usage.total, usage.used, reserved, num_blocks * block_size, used);
  }
  return "";
}

// Every block is free or has an owner, never both; tables have at least ceil(length / block_size) blocks;
// reference counts, capacity() and usage() agree with them. Empty if all of this holds.
// has_windows: blocks that no window reaches are freed while their sequence lives (WINDOWS.md).
inline std::string check_ledger(const stage::KvCacheManager& manager, int num_blocks, int block_size,
                                bool has_windows = false) {
  const Snapshot snapshot = take_snapshot(manager);
  std::string problem = check_lengths(snapshot, block_size);
  if (problem.empty()) {
    problem = check_owners(snapshot, num_blocks, has_windows);
  }
  if (problem.empty()) {
    problem = check_usage(snapshot, manager.usage(), num_blocks, block_size);
  }
#if STAGE_NUMBER >= 6
  for (const int block : snapshot.cached_blocks) {
    if (problem.empty() && !manager.prefix_cache().contains(block)) {
      problem = common::format("block %d is cached, but cannot be found: ", block);
    }
  }
  if (problem.empty() && manager.usage().cached != static_cast<int>(snapshot.cached_blocks.size()) * block_size) {
    problem = common::format("usage() says %d slots cached, and it is %zu: ", manager.usage().cached,
                             snapshot.cached_blocks.size() * static_cast<std::size_t>(block_size));
  }
#endif
  return problem.empty() ? "" : problem + to_string(snapshot);
}

#if STAGE_NUMBER >= 5
// For a sequence that has just been given room for num_tokens more: no block that these will be written to has another
// owner (stage 5, invariant 3). Empty if so.
inline std::string check_writable(const stage::KvCacheManager& manager, int sequence, int num_tokens) {
  for (const int slot : manager.slots(sequence, manager.length(sequence), num_tokens)) {
    const int block = slot / manager.block_size();
    if (manager.reference_count(block) != 1) {
      return common::format("sequence %d may write to block %d, which has %d owners: ", sequence, block,
                            manager.reference_count(block)) +
             to_string(take_snapshot(manager));
    }
  }
  return "";
}
#endif

}  // namespace tests
