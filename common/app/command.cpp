#include "common/app/command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <limits>
#include <numeric>
#include <sstream>
#include <string_view>
#include <system_error>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

constexpr std::size_t kHelpColumns = 80;
constexpr std::size_t kTextColumn = 28;  // where the explanations begin

// `text` in lines of at most kHelpColumns, each indented by `indent` spaces.
std::string wrap(const std::string& text, std::size_t indent) {
  std::string result;
  std::string line(indent, ' ');
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (line.size() > indent && line.size() + 1 + word.size() > kHelpColumns) {
      result += line + '\n';
      line.assign(indent, ' ');
    }
    line += (line.size() > indent ? " " : "") + word;
  }
  return result + line + '\n';
}

// "  --slots N               size of the cache, in tokens (default: 512)"
std::string help_entry(const std::string& name, const std::string& text) {
  std::string start = "  " + name;
  if (start.size() + 2 > kTextColumn) {
    return start + '\n' + wrap(text, kTextColumn);
  }
  start.resize(kTextColumn, ' ');
  return start + wrap(text, kTextColumn).substr(kTextColumn);
}

class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    const std::string& value = option->get_type_name();
    const std::string& default_text = option->get_default_str();
    return help_entry(make_option_name(option, is_positional) + (value.empty() ? "" : " " + value),
                      option->get_description() + (default_text.empty() ? "" : " (default: " + default_text + ")"));
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return help_entry(command->get_name(), command->get_description());
  }
  std::string make_description(const CLI::App* command) const override { return wrap(command->get_description(), 0); }
};

template <typename Integer>
Integer parse_integer(const std::string& text, Range<Integer> range) {
  Integer value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end || value < range.min || value > range.max) {
    throw InputError(quote(text) + " is not a whole number from " + std::to_string(range.min) + " to " +
                     std::to_string(range.max));
  }
  return value;
}

// An option with one value. `set` is called with its text.
CLI::Option& add(CLI::App& app, const std::string& name, const std::string& value_name, const std::string& default_text,
                 const std::string& help, std::function<void(const std::string&)> set) {
  const auto set_each = [name, set = std::move(set)](const std::vector<std::string>& texts) {
    try {
      for (const std::string& text : texts) {
        set(text);
      }
    } catch (const InputError& error) {
      throw CLI::ValidationError(name, error.what());
    }
    return true;
  };
  return *app.add_option(name, set_each, help)
              ->type_name(value_name)
              ->default_str(default_text)
              ->allow_extra_args(false);
}

// Stores the text if it passes the check.
std::function<void(const std::string&)> checked(const CheckText& check, std::function<void(const std::string&)> store) {
  return [check, store = std::move(store)](const std::string& text) {
    if (check) {
      check(text);
    }
    store(text);
  };
}

const std::string& file_name(const std::string& text) {
  if (text.empty()) {
    throw InputError("the file's name is empty");
  }
  return text;
}

template <typename Integer>
void add_integer(CLI::App& app, const std::string& name, Integer& value, Range<Integer> range,
                 const std::string& help) {
  const bool shows_default = value >= range.min && value <= range.max;
  add(app, name, "N", shows_default ? std::to_string(value) : "", help,
      [&value, range](const std::string& text) { value = parse_number(text, range); });
}

template <typename Real>
void add_real(CLI::App& app, const std::string& name, Real& value, Range<double> range, const std::string& help) {
  const auto real = static_cast<double>(value);
  const bool shows_default = real >= range.min && real <= range.max;
  add(app, name, "X", shows_default ? format("%g", real) : "", help,
      [&value, range](const std::string& text) { value = static_cast<Real>(parse_number(text, range)); });
}

std::string lower_case(std::string text) {
  for (char& c : text) {
    c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return text;
}

// How many characters have to be inserted, left out or replaced, or neighbours swapped, to make one word of the other
// (the restricted Damerau-Levenshtein distance).
std::size_t edit_distance(std::string_view from, std::string_view to) {
  std::vector<std::size_t> before;  // the row before the last
  std::vector<std::size_t> last(to.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= from.size(); ++i) {
    std::vector<std::size_t> row = {i};
    for (std::size_t j = 1; j <= to.size(); ++j) {
      const std::size_t replaced = last[j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1);
      row.push_back(std::min({last[j] + 1, row[j - 1] + 1, replaced}));
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before = std::exchange(last, std::move(row));
  }
  return last.back();
}

// "; did you mean --prompt?", or nothing if none of the names is near.
std::string suggestion(std::string_view word, const std::vector<std::string>& names) {
  const auto bare = [](std::string_view name) {
    return name.substr(std::min(name.find_first_not_of('-'), name.size()));
  };
  const std::string_view typed = bare(word.substr(0, word.find('=')));
  std::size_t least = typed.size() / 3 + 1;  // more would be another word
  std::string nearest;
  for (const std::string& name : names) {
    const std::string_view candidate = bare(name);
    const bool is_begun = typed.size() > 2 && candidate.starts_with(typed);
    if (const std::size_t distance = is_begun ? 1 : edit_distance(typed, candidate); distance < least) {
      least = distance;
      nearest = name;
    }
  }
  return nearest.empty() ? "" : "; did you mean " + nearest + "?";
}

// "--prompt" and so on.
std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* const option : command.get_options()) {
    const std::vector<std::string>& long_names = option->get_lnames();
    std::transform(long_names.begin(), long_names.end(), std::back_inserter(names),
                   [](const std::string& name) { return "--" + name; });
  }
  return names;
}

// The first word of the command line that CLI11 could not use, and what may have been meant: CLI11 itself names all
// such words, last one first.
std::string unexpected_word(const CLI::App& program, const CLI::App& command, int argc, const char* const* argv) {
  const std::vector<std::string> unused = program.remaining(true);
  const auto* const found = std::find_first_of(argv + 1, argv + argc, unused.begin(), unused.end());
  const std::string word = found != argv + argc ? *found : unused.empty() ? "" : unused.front();
  if (!word.starts_with('-')) {
    const bool has_prompt = command.get_option_no_throw("--prompt") != nullptr;
    return "unexpected " + quote(word) + (has_prompt ? "; a text to continue goes after --prompt" : "");
  }
  return "no option " + quote(word) + suggestion(word, option_names(command));
}

}  // namespace

int parse_number(const std::string& text, Range<int> range) { return parse_integer(text, range); }

std::int64_t parse_number(const std::string& text, Range<std::int64_t> range) { return parse_integer(text, range); }

std::uint64_t parse_number(const std::string& text, Range<std::uint64_t> range) { return parse_integer(text, range); }

double parse_number(const std::string& text, Range<double> range) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool is_number = !text.empty() && end == text.c_str() + text.size();
  if (!is_number || !(value >= range.min && value <= range.max)) {  // NaN fails both comparisons
    throw InputError(quote(text) + format(" is not a number from %g to %g", range.min, range.max));
  }
  return value;
}

void Command::option(const std::string& name, int& value, Range<int> range, const std::string& help) {
  add_integer(app_, name, value, range, help);
}

void Command::option(const std::string& name, std::optional<int>& value, Range<int> range, const std::string& help) {
  add(app_, name, "N", value ? std::to_string(*value) : "", help,
      [&value, range](const std::string& text) { value = parse_number(text, range); });
}

void Command::option(const std::string& name, std::int64_t& value, Range<std::int64_t> range, const std::string& help) {
  add_integer(app_, name, value, range, help);
}

void Command::option(const std::string& name, float& value, Range<double> range, const std::string& help) {
  add_real(app_, name, value, range, help);
}

void Command::option(const std::string& name, double& value, Range<double> range, const std::string& help) {
  add_real(app_, name, value, range, help);
}

void Command::option(const std::string& name, std::uint64_t& value, const std::string& help) {
  add_integer(app_, name, value, {0, std::numeric_limits<std::uint64_t>::max()}, help);
}

void Command::option(const std::string& name, std::string& value, const std::string& help, const CheckText& check) {
  add(app_, name, "TEXT", value, help, checked(check, [&value](const std::string& text) { value = text; }));
}

void Command::option(const std::string& name, std::optional<std::string>& value, const std::string& help,
                     const CheckText& check) {
  add(app_, name, "TEXT", value.value_or(""), help,
      checked(check, [&value](const std::string& text) { value = text; }));
}

void Command::file(const std::string& name, std::string& value, const std::string& help) {
  add(app_, name, "FILE", value, help, [&value](const std::string& text) { value = file_name(text); });
}

void Command::file(const std::string& name, std::vector<std::string>& values, const std::string& help) {
  add(app_, name, "FILE", "", help, [&values](const std::string& text) {
    values.push_back(file_name(text));
  }).multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void Command::option(const std::string& name, std::vector<std::string>& values, const std::string& help,
                     const CheckText& check) {
  option(name, checked(check, [&values](const std::string& text) { values.push_back(text); }), help);
}

void Command::option(const std::string& name, std::function<void(const std::string&)> set, const std::string& help) {
  add(app_, name, "TEXT", "", help, std::move(set)).multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void Command::choice(const std::string& name, const std::vector<std::string>& words,
                     std::function<void(std::size_t)> set, const std::string& default_word, const std::string& help) {
  std::string alternatives;
  for (const std::string& word : words) {
    alternatives += (alternatives.empty() ? "" : "|") + word;
  }
  add(app_, name, alternatives, default_word, help,
      [words, alternatives, set = std::move(set)](const std::string& text) {
        const auto found = std::find(words.begin(), words.end(), lower_case(text));
        if (found == words.end()) {
          throw InputError(quote(text) + " is not one of " + alternatives);
        }
        set(static_cast<std::size_t>(found - words.begin()));
      });
}

void Command::flag(const std::string& name, bool& value, const std::string& help) {
  app_.add_flag_callback(
      name, [&value] { value = true; }, help);
}

void Command::flag_off(const std::string& name, bool& value, const std::string& help) {
  app_.add_flag_callback(
      name, [&value] { value = false; }, help);
}

void Command::flag_pair(const std::string& name, std::optional<bool>& value, const std::string& help) {
  CLI::Option* const on = app_.add_flag_callback(
      "--" + name, [&value] { value = true; }, help);
  app_.add_flag_callback(
          "--no-" + name, [&value] { value = false; }, "the opposite")
      ->excludes(on);
}

void Command::remove(const std::string& name) { app_.remove_option(app_.get_option(name)); }

bool Command::is_given(const std::string& name) const {
  const CLI::Option* const option = app_.get_option_no_throw(name);
  return option != nullptr && option->count() > 0;
}

void Command::exclude(const std::string& name, const std::string& other) {
  app_.get_option(name)->excludes(app_.get_option(other));
}

void Command::require(const std::string& name, const std::string& other) {
  app_.get_option(name)->needs(app_.get_option(other));
}

CommandLine::CommandLine(const std::string& program, const std::string& description)
    : app_(std::make_unique<CLI::App>(description, program)) {
  app_->formatter(std::make_shared<HelpFormatter>());
  app_->set_version_flag("--version", program + " of paged_attention_course " COURSE_VERSION, "print the version");
  app_->require_subcommand(1);
}

CommandLine::~CommandLine() = default;

Command& CommandLine::add(const std::string& name, const std::string& description, std::function<void()> run) {
  CLI::App& app = *app_->add_subcommand(name, description);
  app.callback(std::move(run));
  return commands_.emplace_back(Command(app));
}

// Each word in a line, with a tab and what it means behind it. None if a text, a number or a file's name follows.
void CommandLine::print_next_words(std::span<const std::string> words) const {
  if (!words.empty() && words.front() == "help") {
    words = words.subspan(1);
  }
  const CLI::App* command = app_.get();
  for (const Command& each : commands_) {
    if (words.empty()) {
      std::cout << each.app_.get_name() << '\t' << each.app_.get_description() << '\n';
    } else if (words.front() == each.app_.get_name()) {
      command = &each.app_;
    }
  }
  const auto print_alternatives = [](const CLI::Option& option) {  // of a value "auto|fp8"
    const std::string value = option.get_type_name();
    std::istringstream alternatives(value.find('|') == std::string::npos ? "" : value);
    for (std::string word; std::getline(alternatives, word, '|');) {
      std::cout << word << '\n';
    }
  };
  const CLI::Option* const last = words.empty() ? nullptr : command->get_option_no_throw(words.back());
  if (last != nullptr && !last->get_type_name().empty()) {  // it takes a value
    return print_alternatives(*last);
  }
  for (const CLI::Option* const option : command->get_options()) {
    if (option->get_positional()) {
      print_alternatives(*option);
    }
    for (const std::string& name : option->get_lnames()) {
      std::cout << "--" << name << '\t' << option->get_description() << '\n';
    }
  }
}

int CommandLine::run(int argc, const char* const* argv) {
  constexpr int kUsageError = 2;
  if (argc > 1 && std::string_view(argv[1]) == "--complete") {
    print_next_words(std::vector<std::string>(argv + 2, argv + argc));
    return 0;
  }
  if (argc > 1 && std::string_view(argv[1]) == "help") {  // "help serve" is "serve --help"
    std::vector<const char*> words(argv, argv + argc);
    words.erase(words.begin() + 1);
    words.push_back("--help");
    return run(argc, words.data());
  }
  std::string who = app_->get_name();
  const auto refuse = [&](const std::string& problem) {
    std::cerr << who << ": " << problem << '\n' << "try '" << who << " --help'\n";
    return kUsageError;
  };
  if (argc < 2) {
    std::cerr << app_->help();
    return kUsageError;
  }
  const CLI::App* command = app_.get();
  std::vector<std::string> names;
  for (const Command& each : commands_) {
    names.push_back(each.app_.get_name());
    command = names.back() == argv[1] ? &each.app_ : command;
  }
  names.emplace_back("help");
  if (command != app_.get()) {
    who += " " + command->get_name();
  } else if (argv[1][0] != '-') {
    return refuse("no command " + quote(argv[1]) + suggestion(argv[1], names));
  } else if (app_->get_option_no_throw(argv[1]) == nullptr) {
    return refuse("no option " + quote(argv[1]) + suggestion(argv[1], option_names(*app_)));
  }
  try {
    app_->parse(argc, argv);
    return 0;
  } catch (const CLI::ExtrasError&) {
    return refuse(unexpected_word(*app_, *command, argc, argv));
  } catch (const CLI::Success& request) {  // --help, --version
    return app_->exit(request);
  } catch (const UsageError& error) {
    return refuse(error.what());
  } catch (const CLI::ParseError& error) {
    const std::string problem = error.what();
    const bool lacks_value = problem.find(": 1 required ") != std::string::npos;  // "--seed: 1 required N missing"
    return refuse(lacks_value ? problem.substr(0, problem.find(':')) + " needs a value" : problem);
  }
}

}  // namespace common
