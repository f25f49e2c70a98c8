// An exception in words for a user.
#pragma once

#include <exception>
#include <new>
#include <string>

namespace common {

// "out of memory" for bad_alloc, whose own text is its name in C++. A std::string holds that without more memory.
inline std::string message_of(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? "out of memory" : error.what();
}

}  // namespace common
