// Commands as words: what the demonstrations' shell and the scenes read.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/check.h"

namespace common {

using Words = std::vector<std::string>;

// What spaces separate.
Words split_words(std::string_view text);

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

// "1 token", "3 tokens"
std::string counted(int count, const std::string& noun);
// "7", "7 and 1", "7, 1 and 3"
std::string listed(std::span<const int> numbers);
// "block 7", "blocks 7, 1 and 3"
std::string listed(const std::string& noun, std::span<const int> numbers);

}  // namespace common
