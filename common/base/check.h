// Two kinds of failure, kept apart everywhere:
//   InputError   the user can cause it (a file, an option, a prompt): one line on stderr, exit code 1.
//   CheckError   only a bug can cause it: COMMON_CHECK, which unlike assert stays on in Release builds.
// Running out of cache slots is neither: it is a normal outcome, and a returned value.
#pragma once

#include <stdexcept>
#include <string>

namespace common {

class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class CheckError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] void check_failed(const char* condition, const std::string& message, const char* file, int line);

}  // namespace common

// Throws CheckError naming the condition, the message, file and line. `message` is evaluated on failure only.
#define COMMON_CHECK(condition, message)                                 \
  do {                                                                   \
    if (!(condition)) {                                                  \
      ::common::check_failed(#condition, (message), __FILE__, __LINE__); \
    }                                                                    \
  } while (false)
