// On what terms a sequence is let into the cache.
#pragma once

#include <limits>

namespace stage8 {

struct Admission {
  // Of the tokens that are not found in the cache, so many at most get slots for now.
  int most_tokens = std::numeric_limits<int>::max();
  // Blocks that have to be left for others to grow into.
  int spare_blocks = 0;
  // Whether blocks that others have computed are looked for.
  bool share = true;
};

}  // namespace
