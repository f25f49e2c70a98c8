#include "tests/support/paths.h"

namespace tests {

std::string source_path(std::string_view name) { return std::string(COMMON_SOURCE_DIR "/").append(name); }

}  // namespace tests
