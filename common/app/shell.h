// A small command shell, one command a line: `name argument …`. It drives the demonstrations, from a script, a pipe or
// a keyboard.
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

// The sequence of that name, which must be live in the stage's manager or, for a new one, must not be: InputError.
template <typename Manager>
int sequence_named(const Manager& manager, const std::string& name, bool live) {
  const int sequence = sequence_id(name);
  if (manager.contains(sequence) != live) {
    throw InputError("sequence " + name + (live ? " is not there" : " is there already"));
  }
  return sequence;
}

// A number from `least` up; InputError naming it otherwise.
int parse_count(std::string_view text, int least);

class Shell {
 public:
  using Arguments = std::vector<std::string>;

  // usage: the arguments, "NAME COUNT"; their number is checked before `run` is called. run prints what it has to say.
  void add(const std::string& name, const std::string& usage, const std::string& help,
           std::function<void(const Arguments&)> run);

  // Runs the lines of `input` until its end or `quit`; `#` starts a comment, `help` lists the commands. With echo, each
  // line is printed behind "> " before its output, so that a script reads like a session. A line that is wrong is
  // answered with one line "error: …" and changes nothing. Returns the number of such lines.
  int run(std::istream& input, std::ostream& output, bool echo);

 private:
  struct Command {
    std::string usage;
    std::string help;
    std::size_t num_arguments = 0;
    std::function<void(const Arguments&)> run;
  };
  void run_line(const std::string& line, std::ostream& output);

  std::map<std::string, Command> commands_;
};

}  // namespace common
