#include "common/serving/distribution.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "common/base/check.h"

namespace common {

Spread spread_of(std::vector<double> values) {
  if (values.empty()) {
    return {};
  }
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
    return values[std::max<std::size_t>(rank, 1) - 1];
  };
  return {std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size()), at(0.5), at(0.99),
          false};
}

void Distribution::add(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  if (static_cast<std::size_t>(bucket) < counts_.size()) {
    counts_[static_cast<std::size_t>(bucket)] += 1;
  }
  count_ += 1;
  sum_ += value;
  if (keep_ == Keep::kValues) {
    values_.push_back(value);
  }
}

Spread Distribution::spread() const {
  COMMON_CHECK(keep_ == Keep::kValues, "the values were not kept");
  return spread_of(values_);
}

}  // namespace common
