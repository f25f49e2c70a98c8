// The bundled model inside the program is the file in the repository, byte for byte.
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "common/model/default_model.h"
#include "tests/support/catch.h"
#include "tests/support/paths.h"

namespace {

std::string_view bundled() {
  const std::span<const std::byte> bytes = common::default_model();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

TEST_CASE("the embedded model is the file in the repository") {
  std::ifstream file(tests::source_path("common/model/tales/tales-5m-q8_0.gguf"), std::ios::binary);
  REQUIRE(file.is_open());
  const std::string expected{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  REQUIRE(bundled().size() == 5438752);  // common/model/tales/MODEL.md
  // In parentheses, so that a failure does not print megabytes.
  REQUIRE((bundled() == expected));
}

TEST_CASE("the embedded model is aligned to a cache line") {
  // Offsets in a GGUF file are aligned to 32 bytes, so 64 keeps every tensor aligned for vector loads.
  REQUIRE(reinterpret_cast<std::uintptr_t>(common::default_model().data()) % 64 == 0);
}
