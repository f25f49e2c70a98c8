// Notes on stderr, and what programs remember of them between runs.
#pragma once

#include <string>

namespace common {

// Prints "note: ..." on stderr, apart from the results, once in a run.
void print_note(const std::string& note);

// A file of the course under $XDG_STATE_HOME, or under ~/.local/state (the XDG Base Directory Specification); empty if
// the environment names neither.
std::string state_path(const std::string& name);

// Says that a program computes on the CPU although a GPU would do, and why. Where there is a GPU's driver, that is a
// surprise, and said in every run. Elsewhere it is expected: it is said on a terminal only, and again only when the
// reason has changed.
void note_cpu(const std::string& reason);

// The last such reason, said or not; empty: there is none.
const std::string& cpu_reason();

// The decision by itself. path: the file that remembers the reason said last; empty: nothing is remembered.
bool is_cpu_worth_a_note(const std::string& reason, bool has_driver, bool is_terminal, const std::string& path);

}  // namespace common
