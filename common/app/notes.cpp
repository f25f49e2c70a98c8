#include "common/app/notes.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

#include "common/base/platform.h"

namespace common {
namespace {

std::string& last_cpu_reason() {
  static std::string reason;
  return reason;
}

}  // namespace

void print_note(const std::string& note) {
  static std::set<std::string> said;
  if (said.insert(note).second) {
    std::cerr << "note: " << note << '\n';
  }
}

std::string state_path(const std::string& name) {
  const auto folder = [](const char* variable) {
    const char* const value = std::getenv(variable);
    return std::filesystem::path(value != nullptr ? value : "");
  };
  std::filesystem::path state = folder("XDG_STATE_HOME");
  if (!state.is_absolute() && folder("HOME").is_absolute()) {  // a relative one is invalid, says the specification
    state = folder("HOME") / ".local" / "state";
  }
  return state.is_absolute() ? (state / "paged_attention_course" / name).string() : "";
}

bool is_cpu_worth_a_note(const std::string& reason, bool has_driver, bool is_terminal, const std::string& path) {
  if (has_driver || !is_terminal) {
    return has_driver;
  }
  std::stringstream remembered;
  remembered << std::ifstream(path).rdbuf();
  if (remembered.str() == reason + "\n") {
    return false;
  }
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  std::ofstream(path) << reason << "\n";  // where that fails, the next run says it again
  return true;
}

void note_cpu(const std::string& reason) {
  if (std::exchange(last_cpu_reason(), reason) != reason &&  // a run may make several engines
      is_cpu_worth_a_note(reason, has_gpu_driver(), is_terminal(std::cerr), state_path("cpu_note"))) {
    print_note("computing on the CPU: " + reason);
  }
}

const std::string& cpu_reason() { return last_cpu_reason(); }

}  // namespace common
