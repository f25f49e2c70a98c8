// Memory runs out at the k-th allocation of a /save, for every k: the file is whole, the earlier one or the new one,
// and nothing is left beside it.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <sstream>
#include <string>

#include "common/app/conversation.h"
#include "common/app/session.h"
#include "common/base/check.h"
#include "common/model/default_model.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/support/catch.h"
#include "tests/support/failing_allocations.h"

namespace {

int until_failure = -1;  // negative: none fails
bool has_run_out = false;

}  // namespace

bool tests::allocation_fails() {
  if (until_failure < 0 || until_failure-- != 0) {
    return false;
  }
  has_run_out = true;
  return true;
}

namespace {

namespace fs = std::filesystem;

common::Session make_session() {
  const auto file =
      std::make_shared<const common::Gguf>(common::Gguf::parse(common::default_model(), "the bundled model"));
  common::Session result{"tales", common::Llama(*file), common::Tokenizer(*file), {}, {common::Request{}}};
  result.file = file;
  return result;
}

common::RunResult run_nothing(std::span<const common::Request>, const common::OnToken&) {
  common::RunResult result;
  result.counters = {{"slots_total", 1024.0}};
  return result;
}

std::string text_of(const fs::path& path) {
  std::ifstream stream(path);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// Types these lines.
void say(common::Conversation& conversation, const fs::path& typed) {
  REQUIRE(std::freopen(typed.c_str(), "r", stdin) != nullptr);
  std::ostringstream output;
  conversation.converse(output);
}

}  // namespace

TEST_CASE("saving: wherever memory runs out, the file is whole, and nothing is left beside it") {
  const fs::path folder = fs::temp_directory_path() / ("saving-" + std::to_string(std::random_device{}()));
  fs::create_directories(folder / "saved");
  const fs::path saved = folder / "saved" / "a conversation whose file has a name that is not short";
  std::ofstream(folder / "loaded")
      << R"({"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A wolf."}]})";
  std::ofstream(folder / "load") << "/load " + (folder / "loaded").string() + "\n";
  std::ofstream(folder / "save") << "/save " + saved.string() + "\n";
  const common::Session session = make_session();
  common::Conversation conversation(session, run_nothing, "");
  say(conversation, folder / "load");
  say(conversation, folder / "save");
  const std::string whole = text_of(saved);
  REQUIRE(whole.find("A wolf.") != std::string::npos);
  const std::string earlier = "the earlier conversation";
  int num_kept = 0;
  bool goes_on = true;
  for (int count = 0; goes_on; ++count) {
    CAPTURE(count);
    const bool is_new = count % 2 == 0;
    fs::remove(saved);
    if (!is_new) {
      std::ofstream(saved) << earlier;
    }
    has_run_out = false;
    until_failure = count / 2;
    try {
      say(conversation, folder / "save");
    } catch (const std::bad_alloc&) {
    } catch (const common::InputError&) {  // what is said of it could not be written
    }
    until_failure = -1;
    goes_on = has_run_out || is_new;
    const std::string text = text_of(saved);
    CHECK((text == whole || (has_run_out && text == (is_new ? "" : earlier))));
    CHECK((has_run_out || text == whole));
    num_kept += text == earlier ? 1 : 0;
    const auto files = fs::directory_iterator(folder / "saved");
    CHECK(std::distance(begin(files), end(files)) == (text.empty() ? 0 : 1));
  }
  CHECK(num_kept > 3);
  fs::remove_all(folder);
}
