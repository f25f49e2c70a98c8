// The books of stage 1's manager, whose slots are regions and holes: read and checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "common/base/text.h"
#include "stage1/kv_cache_manager.h"

namespace tests {

inline std::string to_string(const stage1::Region& region) {
  return common::format("%d+%d", region.first, region.size);
}

// "0+4 10+2": the holes, or any other regions, as first+size.
inline std::string to_string(const std::vector<stage1::Region>& regions) {
  std::string result;
  for (const stage1::Region& region : regions) {
    result += (result.empty() ? "" : " ") + to_string(region);
  }
  return result;
}

// Everything that can be asked of a manager: if two texts are equal, nothing has changed.
inline std::string describe(const stage1::KvCacheManager& manager) {
  std::string result = "holes " + to_string(manager.holes());
  for (const stage1::SequenceId sequence : manager.sequences()) {
    result += common::format(", %d at %s holds %d", sequence, to_string(manager.region(sequence)).c_str(),
                             manager.length(sequence));
  }
  return result;
}

// The ledger: every slot is in one hole or belongs to one sequence; holes ascend, are not empty and do not touch; and
// usage() agrees. Empty if all of this holds.
inline std::string check_ledger(const stage1::KvCacheManager& manager, int num_slots) {
  std::vector<int> owners(static_cast<std::size_t>(num_slots), 0);
  const auto claim = [&](const stage1::Region& region) {
    if (region.size <= 0 || region.first < 0 || region.first + region.size > num_slots) {
      return false;
    }
    for (int slot = region.first; slot < region.first + region.size; ++slot) {
      owners[static_cast<std::size_t>(slot)] += 1;
    }
    return true;
  };

  int end_of_last_hole = -1;
  for (const stage1::Region& hole : manager.holes()) {
    if (!claim(hole)) {
      return "hole " + to_string(hole) + " is empty or outside the cache";
    }
    if (hole.first <= end_of_last_hole) {
      return "hole " + to_string(hole) + " is out of order or touches the one before";
    }
    end_of_last_hole = hole.first + hole.size;
  }
  int reserved = 0;
  int used = 0;
  for (const stage1::SequenceId sequence : manager.sequences()) {
    const stage1::Region region = manager.region(sequence);
    const int length = manager.length(sequence);
    if (!claim(region)) {
      return common::format("sequence %d has a region outside the cache", sequence);
    }
    if (length < 0 || length > region.size || manager.capacity(sequence) != region.size) {
      return common::format("sequence %d holds %d tokens in %d slots", sequence, length, region.size);
    }
    reserved += region.size;
    used += length;
  }
  const auto wrong = std::find_if(owners.begin(), owners.end(), [](int count) { return count != 1; });
  if (wrong != owners.end()) {
    if (*wrong == 0) {
      return common::format("slot %td is lost: it is in no hole and in no region", wrong - owners.begin());
    }
    return common::format("slot %td is in %d holes or regions at once", wrong - owners.begin(), *wrong);
  }
  const stage1::Usage usage = manager.usage();
  if (usage.total != num_slots || usage.reserved != reserved || usage.used != used) {
    return common::format("usage() says %d total, %d reserved, %d used", usage.total, usage.reserved, usage.used);
  }
  return "";
}

}  // namespace tests
