// What is to be copied, planned by KvCacheManager and carried out by KvCache: neither needs to know the other.
#pragma once

namespace stage6 {

// The K and V of block `source`, in all layers, are to be copied to block `destination`.
struct BlockCopy {
  int source = 0;
  int destination = 0;
};

}  // namespace
