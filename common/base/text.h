// Text for tables and messages: formatted strings, numbers with units, quoted strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace common {

// What printf would print.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string format_bytes(std::int64_t bytes);           // "896 B", "22.5 KiB", "1.56 GiB": three significant digits
std::string format_count(std::int64_t count);           // "1,234,567"
std::string format_list(std::span<const int> numbers);  // "[7, 1, 3]"
std::string format_percent(double part, double whole);  // "93.8 %"; "-" when whole is 0

// Whether a terminal may take the character for more than a sign to show: control characters, line and paragraph
// separators; and marks, embeddings, overrides and isolates, which change the direction of a text and so the order in
// which its characters are shown.
bool is_deceptive(char32_t code_point);

// `text` in one line, for messages: in quotes, with line ends, control characters, changes of direction and bytes that
// are not UTF-8 escaped as in C. Cut after at most max_length bytes of `text`, between characters; "..." then follows
// the closing quote.
std::string quote(std::string_view text, std::size_t max_length = 80);

}  // namespace common
