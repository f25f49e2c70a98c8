// Results as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "common/model/generation.h"

namespace common {

// {"name": value, ...}; a whole number has no fraction.
nlohmann::ordered_json to_json(const std::vector<Counter>& counters);

}  // namespace common
