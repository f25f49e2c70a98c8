// What tests of error messages share.
#pragma once

#include <string>
#include <string_view>

#include "common/base/check.h"

namespace tests {

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// The message of the Error that `action` throws; empty if it throws nothing. Other exceptions pass through.
template <typename Error = common::InputError, typename Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace tests
