// Strict UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace common {

struct Utf8Character {
  char32_t code_point = 0;
  std::size_t num_bytes = 0;  // 1 to 4
};

// The character that starts at byte `offset` (< text.size()). Throws InputError naming the byte offset for everything
// that the Unicode standard calls ill-formed (chapter 3, table 3-7): stray or missing continuation bytes, overlong
// forms, surrogates, code points above U+10FFFF.
Utf8Character decode_utf8(std::string_view text, std::size_t offset);

// Bytes of the character that `text` opens with; 0 if it opens with none.
std::size_t valid_utf8_length(std::string_view text);

// Throws like decode_utf8, at the first ill-formed byte, if there is one.
void check_utf8(std::string_view text);

// Appends the UTF-8 form of a code point that is one: at most U+10FFFF and no surrogate.
void append_utf8(char32_t code_point, std::string& out);

}  // namespace common
