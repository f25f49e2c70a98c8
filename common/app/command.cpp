#include "common/app/command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
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

[[noreturn]] void refuse(const std::string& name, const std::string& problem) {
  throw CLI::ValidationError(name, problem);
}

template <typename Integer>
Integer parse_integer(const std::string& name, const std::string& text, Range<Integer> range) {
  Integer value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end || value < range.min || value > range.max) {
    refuse(name, quote(text) + " is not a whole number from " + std::to_string(range.min) + " to " +
                     std::to_string(range.max));
  }
  return value;
}

double parse_real(const std::string& name, const std::string& text, Range<double> range) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool is_number = !text.empty() && end == text.c_str() + text.size();
  if (!is_number || !(value >= range.min && value <= range.max)) {  // NaN fails both comparisons
    refuse(name, quote(text) + format(" is not a number from %g to %g", range.min, range.max));
  }
  return value;
}

// An option with one value. `set` is called with its text.
CLI::Option& add(CLI::App& app, const std::string& name, const std::string& value_name, const std::string& default_text,
                 const std::string& help, std::function<void(const std::string&)> set) {
  const auto set_each = [set = std::move(set)](const std::vector<std::string>& texts) {
    for (const std::string& text : texts) {
      set(text);
    }
    return true;
  };
  return *app.add_option(name, set_each, help)
              ->type_name(value_name)
              ->default_str(default_text)
              ->allow_extra_args(false);
}

template <typename Integer>
void add_integer(CLI::App& app, const std::string& name, Integer& value, Range<Integer> range,
                 const std::string& help) {
  const bool shows_default = value >= range.min && value <= range.max;
  add(app, name, "N", shows_default ? std::to_string(value) : "", help,
      [name, &value, range](const std::string& text) { value = parse_integer(name, text, range); });
}

template <typename Real>
void add_real(CLI::App& app, const std::string& name, Real& value, Range<double> range, const std::string& help) {
  const auto real = static_cast<double>(value);
  const bool shows_default = real >= range.min && real <= range.max;
  add(app, name, "X", shows_default ? format("%g", real) : "", help,
      [name, &value, range](const std::string& text) { value = static_cast<Real>(parse_real(name, text, range)); });
}

std::string lower_case(std::string text) {
  for (char& c : text) {
    c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return text;
}

}  // namespace

void Command::option(const std::string& name, int& value, Range<int> range, const std::string& help) {
  add_integer(app_, name, value, range, help);
}

void Command::option(const std::string& name, std::optional<int>& value, Range<int> range, const std::string& help) {
  add(app_, name, "N", value ? std::to_string(*value) : "", help,
      [name, &value, range](const std::string& text) { value = parse_integer(name, text, range); });
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

void Command::option(const std::string& name, std::string& value, const std::string& help) {
  add(app_, name, "TEXT", value, help, [&value](const std::string& text) { value = text; });
}

void Command::option(const std::string& name, std::optional<std::string>& value, const std::string& help) {
  add(app_, name, "TEXT", value.value_or(""), help, [&value](const std::string& text) { value = text; });
}

void Command::option(const std::string& name, std::vector<std::string>& values, const std::string& help) {
  option(
      name, [&values](const std::string& text) { values.push_back(text); }, help);
}

void Command::option(const std::string& name, std::function<void(const std::string&)> set, const std::string& help) {
  const auto set_or_refuse = [name, set = std::move(set)](const std::string& text) {
    try {
      set(text);
    } catch (const InputError& error) {
      refuse(name, error.what());
    }
  };
  add(app_, name, "TEXT", "", help, set_or_refuse).multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void Command::choice(const std::string& name, const std::vector<std::string>& words,
                     std::function<void(std::size_t)> set, const std::string& default_word, const std::string& help) {
  std::string alternatives;
  for (const std::string& word : words) {
    alternatives += (alternatives.empty() ? "" : "|") + word;
  }
  add(app_, name, alternatives, default_word, help,
      [name, words, alternatives, set = std::move(set)](const std::string& text) {
        const auto found = std::find(words.begin(), words.end(), lower_case(text));
        if (found == words.end()) {
          refuse(name, quote(text) + " is not one of " + alternatives);
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

int CommandLine::run(int argc, const char* const* argv) {
  try {
    const auto is_given = [&](const Command& command) { return command.app_.get_name() == argv[1]; };
    if (argc > 1 && argv[1][0] != '-' && std::none_of(commands_.begin(), commands_.end(), is_given)) {
      throw CLI::ParseError("there is no command " + quote(argv[1]), CLI::ExitCodes::ExtrasError);
    }
    app_->parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app_->exit(error);
  }
}

}  // namespace common
