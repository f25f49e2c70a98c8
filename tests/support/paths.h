// Files of the repository that tests read.
#pragma once

#include <string>
#include <string_view>

namespace tests {

// The absolute path of a file, given from the repository's root: "tests/golden/golden_greedy.json".
std::string source_path(std::string_view name);

}  // namespace tests
