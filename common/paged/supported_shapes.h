// Which shapes production's kernels serve. The table of production_kernels.h answers with it, and every launch checks
// its arguments with it, without knowing the table.
#pragma once

#include <string>

#include "common/paged/page_shape.h"

namespace common {

struct ProductionShapes {
  // As PagedKernels::unsupported.
  std::string unsupported(const PageShape& shape, int num_heads) const;
  static bool has_windows() { return true; }
};

inline constexpr ProductionShapes kProductionShapes{};

}  // namespace common
