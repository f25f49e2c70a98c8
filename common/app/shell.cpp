#include "common/app/shell.h"

#include <iostream>
#include <istream>
#include <optional>
#include <ostream>
#include <sstream>

#include "common/app/text_stream.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"

namespace common {
void Shell::add(const std::string& name, const std::string& usage, const std::string& help,
                std::function<void(const Arguments&, std::ostream&)> run) {
  commands_[name] = {usage, help, split_words(usage).size(), std::move(run)};
}

int Shell::run(std::istream& input, std::ostream& output, bool echo) {
  const bool is_typed = &input == &std::cin && is_input_terminal() && is_terminal(output);
  if (is_typed) {
    WordWrap(output, wrap_columns(output), 0)
        .write(
            "'help' lists the commands, 'quit' ends. In a map: a letter is the sequence that owns a slot, a digit how "
            "many own it, - is reserved and empty, c is cached, . is free.\n");
  }
  const auto prompt = [&] {
    if (is_typed) {
      output << "> " << std::flush;
    }
  };
  std::optional<NoteInterrupts> interrupts;
  if (is_typed) {
    interrupts.emplace();
  }
  const auto read = [&](std::string& line) {
    if (!is_typed) {
      return static_cast<bool>(std::getline(input, line));
    }
    LineInput result = read_line(line);
    for (; result == LineInput::kInterrupted; result = read_line(line)) {  // the terminal has dropped what was typed
      NoteInterrupts::clear();
      output << "\n['quit' or Ctrl-D ends]\n";
      prompt();
    }
    return result == LineInput::kLine;
  };
  int errors = 0;
  prompt();
  for (std::string line; read(line); prompt()) {
    if (echo) {
      output << "> " << line << '\n';
    }
    std::istringstream commands(line.substr(0, line.find('#')));
    for (std::string command; std::getline(commands, command, ';');) {
      const std::vector<std::string> words = split_words(command);
      if (!words.empty() && words.front() == "quit") {
        return errors;
      }
      try {
        run_command(words, output);
      } catch (const InputError& error) {
        output << "error: " << error.what() << '\n';
        ++errors;
      }
    }
    output.flush();
  }
  return errors;
}

void Shell::run_command(std::vector<std::string> words, std::ostream& output) {
  if (words.empty()) {
    return;
  }
  if (words[0] == "help") {
    for (const auto& [name, command] : commands_) {
      output << format("  %-24s %s\n", (name + " " + command.usage).c_str(), command.help.c_str());
    }
    output << format("  %-24s %s\n", "quit", "end the session");
    return;
  }
  const auto found = commands_.find(words[0]);
  if (found == commands_.end()) {
    throw InputError("no command " + quote(words[0]) + "; 'help' lists them");
  }
  words.erase(words.begin());
  if (words.size() != found->second.num_arguments) {
    throw InputError("usage: " + found->first + (found->second.usage.empty() ? "" : " " + found->second.usage));
  }
  found->second.run(words, output);
}

}  // namespace common
