// A small command shell: each command is `name argument …`, and several on a line have `;` between them. The
// demonstrations read it from a script, a pipe or a keyboard.
#pragma once

#include <functional>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

#include "common/app/words.h"

namespace common {

class Shell {
 public:
  using Arguments = Words;

  // usage: the arguments, "NAME COUNT". Their number is checked before `run` is called. `run` prints to the stream that
  // it is given: not every shell is on a terminal.
  void add(const std::string& name, const std::string& usage, const std::string& help,
           std::function<void(const Arguments&, std::ostream&)> run);

  // Runs the lines of `input` until its end or `quit`; `#` starts a comment, `help` lists the commands. With echo, each
  // line is printed after "> " and before its output, so that a script reads like a session. A terminal shows
  // a greeting, and "> " before each line that is typed; Ctrl-C drops the line, and ends nothing. A wrong command
  // prints one line "error: …" and changes nothing. Returns the number of wrong commands.
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
