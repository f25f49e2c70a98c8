// Commands and their options. CLI11 reads the command line; it takes seconds to compile, so that only command.cpp
// includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's own
class App;
}  // namespace CLI

namespace common {

// The values that an option takes, both ends included.
template <typename Number>
struct Range {
  Number min;
  Number max;
};

// What an option sets is its default too. --help shows the default if it is a value that could be given; so an int that
// is 0 for "not set" has a range from 1 on, and its help text says what happens without it.
class Command {
 public:
  void option(const std::string& name, int& value, Range<int> range, const std::string& help);
  void option(const std::string& name, std::int64_t& value, Range<std::int64_t> range, const std::string& help);
  void option(const std::string& name, float& value, Range<double> range, const std::string& help);
  void option(const std::string& name, double& value, Range<double> range, const std::string& help);
  void option(const std::string& name, std::uint64_t& value, const std::string& help);
  void option(const std::string& name, std::string& value, const std::string& help);
  // May be given several times, which the others may not.
  void option(const std::string& name, std::vector<std::string>& values, const std::string& help);
  // The same, with a function called for each text. It throws InputError for one that makes no sense: a usage error.
  void option(const std::string& name, std::function<void(const std::string&)> set, const std::string& help);

  // One of a few words, each of which stands for a value of Value.
  template <typename Value>
  void choice(const std::string& name, Value& value,
              const std::vector<std::pair<std::string, std::type_identity_t<Value>>>& choices,
              const std::string& help) {
    std::vector<std::string> words;
    std::string default_word;
    for (const auto& [word, meaning] : choices) {
      words.push_back(word);
      default_word = meaning == value ? word : default_word;
    }
    choice(
        name, words, [&value, choices](std::size_t index) { value = choices[index].second; }, default_word, help);
  }

  void flag(const std::string& name, bool& value, const std::string& help);      // sets value to true
  void flag_off(const std::string& name, bool& value, const std::string& help);  // sets value to false
  // For the name "run-ahead": --run-ahead sets true, --no-run-ahead false; without either, value stays unset.
  void flag_pair(const std::string& name, std::optional<bool>& value, const std::string& help);

  // It is a usage error to give both options, which have been added.
  void exclude(const std::string& name, const std::string& other);

 private:
  friend class CommandLine;
  explicit Command(CLI::App& app) : app_(app) {}
  void choice(const std::string& name, const std::vector<std::string>& words, std::function<void(std::size_t)> set,
              const std::string& default_word, const std::string& help);

  CLI::App& app_;
};

// A program's commands, of which each run of it executes one.
class CommandLine {
 public:
  CommandLine(const std::string& program, const std::string& description);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command& add(const std::string& name, const std::string& description, std::function<void()> run);

  // Runs the command. Returns 0, or CLI11's code (100 or more) after a usage error, which is said on stderr. What the
  // command throws passes through.
  int run(int argc, const char* const* argv);

 private:
  std::unique_ptr<CLI::App> app_;
  std::list<Command> commands_;  // their addresses are handed out
};

}  // namespace common
