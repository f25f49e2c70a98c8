// The books of a manager of blocks, read and checked. For every stage from the second on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "common/report.h"
#include "tests/stage_api.h"

namespace tests {

// All that a manager says about itself: two equal snapshots mean that nothing has changed.
struct Snapshot {
  struct Sequence {
    std::vector<int> block_table;
    int length = 0;
    int capacity = 0;
    bool operator==(const Sequence&) const = default;
  };

  std::vector<int> free_blocks;
  std::map<int, Sequence> sequences;
  bool operator==(const Snapshot&) const = default;
};

inline Snapshot take_snapshot(const stage::KvCacheManager& manager) {
  Snapshot snapshot;
  snapshot.free_blocks = manager.free_blocks();
  for (const int sequence : manager.sequences()) {
    snapshot.sequences[sequence] = {manager.block_table(sequence), manager.length(sequence),
                                    manager.capacity(sequence)};
  }
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
  return result;
}

// Every block is free or belongs to one sequence, never both and never twice; tables have at least
// ceil(length / block_size) blocks; slots() and usage() agree with them. Empty if all of this holds.
inline std::string check_ledger(const stage::KvCacheManager& manager, int num_blocks, int block_size) {
  const Snapshot snapshot = take_snapshot(manager);
  std::vector<int> owners(static_cast<std::size_t>(num_blocks), 0);
  bool outside = false;
  const auto claim = [&](const std::vector<int>& blocks) {
    for (const int block : blocks) {
      if (block < 0 || block >= num_blocks) {
        outside = true;
      } else {
        owners[static_cast<std::size_t>(block)] += 1;
      }
    }
  };
  claim(snapshot.free_blocks);
  int reserved = 0;
  int used = 0;
  for (const auto& [id, sequence] : snapshot.sequences) {
    claim(sequence.block_table);
    const auto capacity = static_cast<int>(sequence.block_table.size()) * block_size;
    if (sequence.length < 0 || sequence.length > capacity || sequence.capacity != capacity) {
      return common::format("sequence %d holds %d tokens, with a capacity of %d: ", id, sequence.length,
                            sequence.capacity) +
             to_string(snapshot);
    }
    reserved += capacity;
    used += sequence.length;
  }
  const auto wrong = std::find_if(owners.begin(), owners.end(), [](int count) { return count != 1; });
  if (outside || wrong != owners.end()) {
    return common::format("not every one of %d blocks has one owner: ", num_blocks) + to_string(snapshot);
  }
  const stage::Usage usage = manager.usage();
  if (usage.total != num_blocks * block_size || usage.reserved != reserved || usage.used != used) {
    return common::format("usage says %d total, %d reserved, %d used: ", usage.total, usage.reserved, usage.used) +
           to_string(snapshot);
  }
  return "";
}

}  // namespace tests
