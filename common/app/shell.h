// A small command shell: each command is `name argument …`, and several on a line have `;` between them. The
// demonstrations read it from a script, a pipe or a keyboard.
#pragma once

#include <functional>
#include <iosfwd>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/check.h"

namespace common {

// Sequences in a demonstration have one-letter names, A to Z: sequence 0 to 25.
int sequence_id(std::string_view name);  // throws InputError for any other name
char sequence_name(int id);

// The sequence of that name. Throws InputError unless the stage's manager has it (live) or does not have it (!live).
template <typename Manager>
int sequence_named(const Manager& manager, const std::string& name, bool live) {
  const int sequence = sequence_id(name);
  if (manager.contains(sequence) != live) {
    throw InputError("sequence " + name + (live ? " is not there" : " is there already"));
  }
  return sequence;
}

// A whole number, at least `min`. Throws InputError with the text if it is anything else.
int parse_count(std::string_view text, int min);

class Shell {
 public:
  using Arguments = std::vector<std::string>;

  // usage: the arguments, "NAME COUNT". Their number is checked before `run` is called. `run` prints to the stream that
  // it is given: a shell may serve others than a terminal.
  void add(const std::string& name, const std::string& usage, const std::string& help,
           std::function<void(const Arguments&, std::ostream&)> run);

  // Runs the lines of `input` until its end or `quit`; `#` starts a comment, `help` lists the commands. With echo, each
  // line is printed after "> " and before its output, so that a script reads like a session. A terminal shows
  // a greeting, and "> " before each line that is typed. A wrong command prints one line "error: …" and changes
  // nothing. Returns the number of wrong commands.
  int run(std::istream& input, std::ostream& output, bool echo);

 private:
  struct Command {
    std::string usage;
    std::string help;
    std::size_t num_arguments = 0;
    std::function<void(const Arguments&, std::ostream&)> run;
  };
  void run_command(std::vector<std::string> words, std::ostream& output);

  std::map<std::string, Command> commands_;
};

}  // namespace common
