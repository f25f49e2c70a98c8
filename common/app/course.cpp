// Runs every stage on the fixed workload and prints one table: `cmake --workflow --preset course`.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/tensor.h"
#include "common/base/text.h"

namespace {

using common::InputError;
using common::Token;
using Json = nlohmann::json;
using GoldenTokens = std::map<std::string, std::vector<Token>>;  // prompt -> its greedy continuation

// A folder for the stages' results that goes when the program ends.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "course-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw InputError("cannot create a folder like " + pattern + ": " + std::strerror(errno));
    }
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct GeneratedRequest {
  std::string prompt;
  std::string text;
  std::vector<Token> tokens;
};

struct StageResult {
  std::string stage;
  std::vector<GeneratedRequest> requests;
  double slots_reserved = 0.0;  // mean over the steps of the run
  double slots_used = 0.0;
  double milliseconds_per_token = 0.0;
};

Json read_json(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) {
    throw InputError("cannot open " + path + ": " + std::strerror(errno));
  }
  try {
    return Json::parse(stream);
  } catch (const Json::exception& error) {
    throw InputError(path + ": " + error.what());
  }
}

// Starts the program without a shell, so that no path needs quoting. Its standard output is dropped: the JSON file has
// all the table needs, and messages come through standard error.
void run_program(const std::string& program, const std::vector<std::string>& arguments) {
  std::vector<std::string> words{program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  const int failure = posix_spawn(&child, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failure != 0) {
    throw InputError("cannot start " + program + ": " + std::strerror(failure));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {
    throw InputError(program + " was ended by signal " + std::to_string(WTERMSIG(status)));
  }
  if (WEXITSTATUS(status) != 0) {
    throw InputError(program + " ended with exit code " + std::to_string(WEXITSTATUS(status)));
  }
}

StageResult read_stage_result(const std::string& path) {
  const Json json = read_json(path);
  try {
    StageResult result;
    result.stage = json.at("stage").get<std::string>();
    for (const Json& request : json.at("requests")) {
      result.requests.push_back({request.at("prompt").get<std::string>(), request.at("text").get<std::string>(),
                                 request.at("tokens").get<std::vector<Token>>()});
    }
    result.slots_reserved = json.at("counters").at("slots_reserved").get<double>();
    result.slots_used = json.at("counters").at("slots_used").get<double>();
    result.milliseconds_per_token = json.at("timing").at("milliseconds_per_token").get<double>();
    return result;
  } catch (const Json::exception& error) {
    throw InputError(path + ": " + error.what());
  }
}

GoldenTokens read_golden(const std::string& path) {
  const Json json = read_json(path);
  try {
    GoldenTokens golden;
    for (const Json& item : json.at("cases")) {
      golden[item.at("prompt").get<std::string>()] = item.at("generated_ids").get<std::vector<Token>>();
    }
    return golden;
  } catch (const Json::exception& error) {
    throw InputError(path + ": " + error.what());
  }
}

// One of the two may have been cut shorter by its token limit: what both have must agree, and that must be something.
bool same_opening(const std::vector<Token>& actual, const std::vector<Token>& expected) {
  const auto length = static_cast<std::ptrdiff_t>(std::min(actual.size(), expected.size()));
  return length > 0 && std::equal(actual.begin(), actual.begin() + length, expected.begin());
}

// Every request with a golden prompt continues it as the independent program did. A run without any such request has
// shown nothing, and fails.
bool matches_golden(const StageResult& result, const GoldenTokens& golden) {
  int num_compared = 0;
  for (const GeneratedRequest& request : result.requests) {
    const auto expected = golden.find(request.prompt);
    if (expected == golden.end()) {
      continue;
    }
    if (!same_opening(request.tokens, expected->second)) {
      std::cerr << result.stage << ": other tokens than the golden file for " << common::quote(request.prompt) << "\n";
      return false;
    }
    ++num_compared;
  }
  if (num_compared == 0) {
    std::cerr << result.stage << ": none of its prompts is in the golden file\n";
  }
  return num_compared > 0;
}

// Same prompts in the same order, same texts.
bool matches_first(const StageResult& result, const StageResult& first) {
  if (result.requests.size() != first.requests.size()) {
    std::cerr << result.stage << ": " << result.requests.size() << " requests, " << first.stage << " has "
              << first.requests.size() << "\n";
    return false;
  }
  for (std::size_t i = 0; i < first.requests.size(); ++i) {
    if (result.requests[i].prompt != first.requests[i].prompt || result.requests[i].text != first.requests[i].text) {
      std::cerr << result.stage << ": other text than " << first.stage << " for "
                << common::quote(first.requests[i].prompt) << "\n";
      return false;
    }
  }
  return true;
}

StageResult run_stage(const std::string& program, const TemporaryFolder& folder) {
  const std::string name = std::filesystem::path(program).filename().string();
  std::cerr << "running " << name << " ..." << std::endl;
  const std::string path = folder.file(name + ".json");
  run_program(program, {"generate", "--json", path});
  return read_stage_result(path);
}

// Returns whether every stage printed the text it should.
bool run_course(const std::vector<std::string>& programs, const std::string& golden_path) {
  const GoldenTokens golden = read_golden(golden_path);
  const TemporaryFolder folder;
  std::vector<StageResult> results;
  common::Table table({"stage", "text identical", "slots reserved", "slots used", "utilisation", "ms per token"});
  bool all_identical = true;
  for (const std::string& program : programs) {
    results.push_back(run_stage(program, folder));
    const StageResult& result = results.back();
    const bool identical = matches_golden(result, golden) && matches_first(result, results.front());
    all_identical = all_identical && identical;
    table.add_row({result.stage, identical ? "yes" : "no", common::format("%.1f", result.slots_reserved),
                   common::format("%.1f", result.slots_used),
                   common::format_percent(result.slots_used, result.slots_reserved),
                   common::format("%.2f", result.milliseconds_per_token)});
  }
  std::cout << table.to_string();
  return all_identical;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Runs every stage on the same prompts and compares the texts."};
  std::vector<std::string> programs;
  std::string golden_path;
  app.add_option("programs", programs, "the stages' programs, stage 1 first")->required();
  app.add_option("--golden", golden_path, "golden_greedy.json: tokens of an independent program")->required();
  CLI11_PARSE(app, argc, argv);
  try {
    return run_course(programs, golden_path) ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
