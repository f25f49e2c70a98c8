// The little Unicode that byte-level BPE needs: which characters are letters, numbers and spaces. Categories come from
// utf8proc (https://juliastrings.github.io/utf8proc/), a small C library over the Unicode character database.
#pragma once

namespace common {

bool is_letter(char32_t code_point);  // \p{L}: general categories Lu, Ll, Lt, Lm, Lo
bool is_number(char32_t code_point);  // \p{N}: Nd, Nl, No
bool is_space(char32_t code_point);   // \s: the White_Space property, which is wider than the category Z

}  // namespace common
