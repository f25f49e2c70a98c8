// Strict UTF-8.
#pragma once

#include <cstddef>
#include <string_view>

namespace common {

struct Utf8Character {
  char32_t code_point = 0;
  std::size_t num_bytes = 0;  // 1 to 4
};

// The character that starts at byte `offset`, which is less than text.size(). Throws InputError with the byte offset on
// everything that the Unicode standard calls ill-formed (chapter 3, table 3-7): stray or missing continuation bytes,
// overlong forms, surrogates, code points above U+10FFFF.
Utf8Character decode_utf8(std::string_view text, std::size_t offset);

// Length in bytes of the first character of `text`; 0 if `text` is empty or does not begin with a valid one.
std::size_t valid_utf8_length(std::string_view text);

// The length of the text without its last character if bytes of that are still to come. Bytes that are not UTF-8 count
// as characters.
std::size_t whole_characters(std::string_view text);

// Throws what decode_utf8 throws if any part of `text` is ill-formed.
void check_utf8(std::string_view text);

}  // namespace common
