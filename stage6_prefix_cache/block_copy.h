// A copy of a block: KvCacheManager plans it and KvCache carries it out, so that neither needs to know the other.
#pragma once

namespace stage6 {

// K and V of block `source`, in all layers, have to be copied to block `destination`.
struct BlockCopy {
  int source = 0;
  int destination = 0;
};

}  // namespace
