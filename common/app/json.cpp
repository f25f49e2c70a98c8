#include "common/app/json.h"

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace common {

nlohmann::ordered_json to_json(const std::vector<Counter>& counters) {
  nlohmann::ordered_json result = nlohmann::ordered_json::object();
  for (const Counter& entry : counters) {
    constexpr double kMaxWhole = 9007199254740992.0;  // 2^53: above it a double does not hold every whole number
    if (std::trunc(entry.value) == entry.value && std::abs(entry.value) <= kMaxWhole) {
      result[entry.name] = static_cast<std::int64_t>(entry.value);
    } else {
      result[entry.name] = entry.value;
    }
  }
  return result;
}

}  // namespace common
