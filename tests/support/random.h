// Random numbers in a range.
#pragma once

#include <cstdint>

#include "common/math/sampling.h"

namespace tests {

// least … most, both included.
inline int between(common::Random& random, int least, int most) {
  return least +
         static_cast<int>(random.below(static_cast<std::uint64_t>(most) - static_cast<std::uint64_t>(least) + 1));
}

}  // namespace tests
