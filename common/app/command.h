// Commands and their options. CLI11 parses the command line; it takes seconds to compile, so only command.cpp includes
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/base/check.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's own
class App;
}  // namespace CLI

namespace common {

// Options that contradict each other in a way that exclude() and require() can't say. A command throws it before it has
// printed anything.
class UsageError : public InputError {
 public:
  using InputError::InputError;
};

// Throws InputError for a text that is no value of the option, which is then a usage error.
using CheckText = std::function<void(const std::string&)>;

// The values that an option accepts, including both ends.
template <typename Number>
struct Range {
  Number min;
  Number max;
};

// The number that the text is. Throws InputError unless it is one in the range.
int parse_number(const std::string& text, Range<int> range);
std::int64_t parse_number(const std::string& text, Range<std::int64_t> range);
std::uint64_t parse_number(const std::string& text, Range<std::uint64_t> range);
double parse_number(const std::string& text, Range<double> range);

// Each option sets a variable, whose value before is the default. --help shows the default if it is in the option's
// range: an int that is 0 for "not given" has a range from 1, and its help text states the default in words.
class Command {
 public:
  void option(const std::string& name, int& value, Range<int> range, const std::string& help);
  void option(const std::string& name, std::optional<int>& value, Range<int> range, const std::string& help);
  void option(const std::string& name, std::int64_t& value, Range<std::int64_t> range, const std::string& help);
  void option(const std::string& name, float& value, Range<double> range, const std::string& help);
  void option(const std::string& name, double& value, Range<double> range, const std::string& help);
  void option(const std::string& name, std::uint64_t& value, const std::string& help);
  void option(const std::string& name, std::string& value, const std::string& help, const CheckText& check = nullptr);
  void option(const std::string& name, std::optional<std::string>& value, const std::string& help,
              const CheckText& check = nullptr);  // empty: not given
  // A file's name. An empty one is a usage error: it is an unset variable of the shell.
  void file(const std::string& name, std::string& value, const std::string& help);
  void file(const std::string& name, std::vector<std::string>& values, const std::string& help);  // several times
  // May be given several times, unlike the others.
  void option(const std::string& name, std::vector<std::string>& values, const std::string& help,
              const CheckText& check = nullptr);
  // The same, but calls a function for each text. If the function throws InputError, that is a usage error.
  void option(const std::string& name, std::function<void(const std::string&)> set, const std::string& help);

  // One of several words, each of which stands for a value of Value.
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
  // With the name "run-ahead", --run-ahead sets true and --no-run-ahead false; without either, value stays empty.
  void flag_pair(const std::string& name, std::optional<bool>& value, const std::string& help);

  void remove(const std::string& name);  // an option that several commands have, and this one does not use

  bool is_given(const std::string& name) const;  // on the command line; false if there is no such option

  // Makes it a usage error to give both options, which must have been added before.
  void exclude(const std::string& name, const std::string& other);
  // Makes it a usage error to give the option without the other one.
  void require(const std::string& name, const std::string& other);

 private:
  friend class CommandLine;
  explicit Command(CLI::App& app) : app_(app) {}
  void choice(const std::string& name, const std::vector<std::string>& words, std::function<void(std::size_t)> set,
              const std::string& default_word, const std::string& help);

  CLI::App& app_;
};

// The commands of a program. A run executes one of them.
class CommandLine {
 public:
  CommandLine(const std::string& program, const std::string& description);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command& add(const std::string& name, const std::string& description, std::function<void()> run);

  // Runs the command. Returns 0, or 2 after printing a usage error to stderr: program and command, the word as it was
  // typed, and what may have been meant. Without a command it lists them there. Of what the command throws, it catches
  // UsageError alone.
  // "--complete WORD..." runs nothing: for the completions of shells, it prints what may follow these words.
  int run(int argc, const char* const* argv);

 private:
  void print_next_words(std::span<const std::string> words) const;

  std::unique_ptr<CLI::App> app_;
  std::list<Command> commands_;  // a list, because add() returns references
};

}  // namespace common
