// The character classes that byte-level BPE needs (letters, numbers, punctuation and spaces), and widths, as utf8proc
// (https://juliastrings.github.io/utf8proc/) has them, a small C library for the Unicode character database.
#pragma once

#include <string>
#include <string_view>

namespace common {

bool is_letter(char32_t code_point);       // \p{L}: general categories Lu, Ll, Lt, Lm, Lo
bool is_number(char32_t code_point);       // \p{N}: Nd, Nl, No
bool is_punctuation(char32_t code_point);  // \p{P}: Pc, Pd, Ps, Pe, Pi, Pf, Po
bool is_space(char32_t code_point);        // \s: the White_Space property, which is wider than the category Z

// How many columns of a terminal the character takes: 2 for most of Chinese, Japanese and Korean and for emoji, 0 for
// accents that join the character before.
int display_columns(char32_t code_point);

// Normalisation form C (https://www.unicode.org/reports/tr15/) of a text, which must be valid UTF-8.
std::string composed(std::string_view text);

}  // namespace common
