// Tokens and logits that llama.cpp computed for files on this machine, written by peer_cases.py (which says how).
// Opt-in: skipped unless COURSE_PEERS names the folder with them.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/support/catch.h"
#include "tests/support/messages.h"
#include "tests/support/reference_decoder.h"

using common::Gguf;
using common::Token;

namespace {

std::string peers_folder() {
  const char* const folder = std::getenv("COURSE_PEERS");
  return folder == nullptr ? "" : folder;
}

std::vector<std::filesystem::path> cases_named(std::string_view ending) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(peers_folder())) {
    if (entry.path().string().ends_with(ending)) {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

nlohmann::json read_json(const std::filesystem::path& path) {
  std::ifstream stream(path);
  REQUIRE(stream.is_open());
  return nlohmann::json::parse(stream);
}

std::string from_hexadecimal(const std::string& digits) {
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    bytes.push_back(static_cast<char>(static_cast<unsigned char>(std::stoi(digits.substr(i, 2), nullptr, 16))));
  }
  return bytes;
}

}  // namespace

#define REQUIRE_PEERS()                                                             \
  if (peers_folder().empty()) {                                                     \
    SKIP_TEST("COURSE_PEERS is not set (tests/common/peer_cases.py says to what)"); \
  }

TEST_CASE("texts have llama.cpp's tokens", "[peers]") {
  REQUIRE_PEERS();
  for (const std::filesystem::path& path : cases_named(".tokens.json")) {
    const nlohmann::json peers = read_json(path);
    const Gguf file = Gguf::open(peers.at("file").get<std::string>());
    const common::Tokenizer tokenizer(file);
    int num_same = 0;
    int num_lacking = 0;
    for (const nlohmann::json& entry : peers.at("cases")) {
      const auto text = entry.at("text").get<std::string>();
      CAPTURE(path, text);
      std::optional<std::vector<Token>> ids;
      try {
        ids = tokenizer.encode(text, entry.at("special").get<bool>());
      } catch (const common::InputError& error) {
        // SmolLM2's vocabulary lacks some bytes: llama.cpp leaves them out, and this program says so.
        REQUIRE(tests::contains(error.what(), "the vocabulary has no token for byte"));
        ++num_lacking;
        continue;
      }
      const bool is_same = *ids == entry.at("ids").get<std::vector<Token>>();
      CHECK(is_same);
      num_same += is_same ? 1 : 0;
    }
    for (const nlohmann::json& digits : peers.at("invalid")) {
      const std::string text = from_hexadecimal(digits.get<std::string>());
      CHECK(tests::contains(tests::error_of([&] { tokenizer.encode(text); }), "invalid UTF-8"));
    }
    std::cout << common::format("%-40s %d of %zu texts have the same tokens, %d lack a byte\n",
                                path.filename().string().c_str(), num_same, peers.at("cases").size(), num_lacking);
  }
}

TEST_CASE("models have llama.cpp's logits", "[peers]") {
  REQUIRE_PEERS();
  for (const std::filesystem::path& path : cases_named(".logits.json")) {
    const nlohmann::json peers = read_json(path);
    const common::Llama model(Gguf::open(peers.at("file").get<std::string>()), common::Windows::kComputed);
    tests::ReferenceCache cache(model.config());
    const common::Matrix logits = tests::next_logits(model, cache, peers.at("tokens").get<std::vector<Token>>());
    const auto expected = peers.at("logits").get<std::vector<double>>();
    REQUIRE(static_cast<std::size_t>(logits.cols()) == expected.size());
    double worst = 0.0;
    double largest = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto logit = static_cast<double>(logits(logits.rows() - 1, static_cast<Eigen::Index>(i)));
      worst = std::max(worst, std::abs(logit - expected[i]));
      largest = std::max(largest, std::abs(expected[i]));
    }
    // Two programs that add in float32 in different orders, with weights that make activations large, were measured
    // within 2e-5 of the largest logit.
    // llama.cpp looks GELU up in a table of 16-bit floats: within 2.5e-4, and within 7e-5 when it was rounded here,
    // too.
    CAPTURE(path, worst, largest);
    CHECK(worst < (model.config().gelu ? 1e-3 : 2e-4) * largest);
    std::cout << common::format("%-50s logits up to %5.1f, off by at most %.6f\n", path.filename().string().c_str(),
                                largest, worst);
  }
}
