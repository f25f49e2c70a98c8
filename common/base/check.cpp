#include "common/base/check.h"

namespace common {

void check_failed(const char* condition, const std::string& message, const char* file, int line) {
  throw CheckError(std::string(file) + ":" + std::to_string(line) + ": " + message + " (" + condition + ")");
}

}  // namespace common
