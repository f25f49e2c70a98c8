#include "common/base/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>

#include "common/base/check.h"
#include "common/base/utf8.h"

namespace common {
namespace {

std::string escape_bytes(std::string_view bytes) {
  std::string escaped;
  for (const char c : bytes) {
    escaped += format("\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
  }
  return escaped;
}

// character: valid UTF-8.
std::string escape_character(std::string_view character) {
  if (character.size() > 1) {
    return is_deceptive(decode_utf8(character, 0).code_point) ? escape_bytes(character) : std::string(character);
  }
  switch (character[0]) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    case '"':
      return "\\\"";
    case '\\':
      return "\\\\";
    default:
      break;
  }
  return is_deceptive(static_cast<unsigned char>(character[0])) ? escape_bytes(character) : std::string(character);
}

}  // namespace

bool is_deceptive(char32_t code_point) {
  const auto lies_between = [&](char32_t first, char32_t last) { return code_point >= first && code_point <= last; };
  return code_point < 0x20 || lies_between(0x7F, 0x9F) || code_point == 0x61C || lies_between(0x200E, 0x200F) ||
         lies_between(0x2028, 0x202E) || lies_between(0x2066, 0x2069);
}

std::string format(const char* pattern, ...) {
  std::va_list arguments;
  va_start(arguments, pattern);
  std::va_list arguments_again;
  va_copy(arguments_again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(length < 0 ? 0 : static_cast<std::size_t>(length), '\0');
  // The terminating zero overwrites the string's own.
  const int written = std::vsnprintf(text.data(), text.size() + 1, pattern, arguments_again);
  va_end(arguments_again);
  COMMON_CHECK(length >= 0 && written == length, std::string("cannot format ") + pattern);
  return text;
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes > -1024 && bytes < 1024) {
    return format("%lld B", static_cast<long long>(bytes));
  }
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t unit = 0;
  // 999.5 and more would round to four digits.
  while (std::abs(value) >= 999.5) {
    value /= 1024.0;
    ++unit;
  }
  const double size = std::abs(value);
  const int decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  return format("%.*f %s", decimals, value, kUnits[unit]);
}

std::string format_count(std::int64_t count) {
  std::string digits = std::to_string(count);
  const std::ptrdiff_t first_digit = count < 0 ? 1 : 0;
  for (auto at = std::ssize(digits) - 3; at > first_digit; at -= 3) {
    digits.insert(static_cast<std::size_t>(at), 1, ',');
  }
  return digits;
}

std::string format_list(std::span<const int> numbers) {
  std::string list = "[";
  for (const int number : numbers) {
    list += (list.size() > 1 ? ", " : "") + std::to_string(number);
  }
  return list + "]";
}

std::string format_percent(double part, double whole) {
  return whole == 0.0 ? "-" : format("%.1f %%", 100.0 * part / whole);
}

std::string quote(std::string_view text, std::size_t max_length) {
  std::string quoted = "\"";
  std::size_t at = 0;
  while (at < text.size()) {
    // A byte that does not begin a valid character is escaped by itself.
    const std::size_t length = valid_utf8_length(text.substr(at));
    const std::size_t step = std::max<std::size_t>(length, 1);
    if (at + step > max_length) {
      break;
    }
    const std::string_view character = text.substr(at, step);
    quoted += length == 0 ? escape_bytes(character) : escape_character(character);
    at += step;
  }
  // The dots are outside the quotes, where they cannot be taken for part of the text.
  return quoted + (at < text.size() ? "\"..." : "\"");
}

}  // namespace common
