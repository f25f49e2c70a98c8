// JSON: results, and what others have written.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/model/generation.h"

namespace common {

// A document whose lists and objects are nested too deep.
class JsonTooDeep : public InputError {
 public:
  using InputError::InputError;
};

// A document of a client or of a file. Throws nlohmann::json::exception if it is no JSON, and JsonTooDeep: documents
// are copied and compared recursively, and a thread's stack is small.
nlohmann::json parse_json(const std::string& text);

// {"name": value, ...}; a whole number has no fraction.
nlohmann::ordered_json to_json(const std::vector<Counter>& counters);

}  // namespace common
