#include "common/model/generation.h"

#include "common/base/check.h"

namespace common {

double counter(const std::vector<Counter>& counters, std::string_view name) {
  for (const Counter& entry : counters) {
    if (entry.name == name) {
      return entry.value;
    }
  }
  throw CheckError("no counter " + std::string(name));
}

}  // namespace common
