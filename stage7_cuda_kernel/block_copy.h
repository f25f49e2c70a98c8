// A copy of a block: KvCacheManager plans it and KvCache carries it out, so that neither needs to know the other.
#pragma once

#include <cstddef>
#include <set>
#include <span>

namespace stage7 {

// K and V of block `source`, in all layers, have to be copied to block `destination`.
struct BlockCopy {
  int source = 0;
  int destination = 0;
};

// The longest prefix of copies that can be carried out in any order: none writes what another one reads or writes.
inline std::span<const BlockCopy> independent_copies(std::span<const BlockCopy> copies) {
  std::set<int> read;
  std::set<int> written;
  std::size_t count = 0;
  for (; count < copies.size(); ++count) {
    const auto& [source, destination] = copies[count];
    if (written.contains(source) || written.contains(destination) || read.contains(destination)) {
      break;
    }
    read.insert(source);
    written.insert(destination);
  }
  return copies.first(count);
}

}  // namespace
