#include "common/app/report.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "common/base/check.h"

namespace common {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Bytes 10xxxxxx continue a UTF-8 character; every other byte opens one.
bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

// A code point is taken to be one column wide: right for all this project prints.
std::size_t display_columns(std::string_view text) {
  return text.size() - static_cast<std::size_t>(std::count_if(text.begin(), text.end(), continues_character));
}

// "12", "-3.5", "1,234", "22.5 KiB", "93.8 %", "4x": a number, then at most one word.
bool is_number(std::string_view cell) {
  std::size_t at = 0;
  if (at < cell.size() && (cell[at] == '-' || cell[at] == '+')) {
    ++at;
  }
  if (at < cell.size() && cell[at] == '.') {
    ++at;
  }
  if (at == cell.size() || !is_digit(cell[at])) {
    return false;
  }
  while (at < cell.size() && (is_digit(cell[at]) || cell[at] == '.' || cell[at] == ',')) {
    ++at;
  }
  if (at < cell.size() && cell[at] == ' ') {
    ++at;
  }
  return cell.find(' ', at) == std::string_view::npos;
}

// Stands for a number that does not exist, and says nothing about its column.
bool is_blank(std::string_view cell) { return cell.empty() || cell == "-"; }

bool is_number_column(const std::vector<std::vector<std::string>>& rows, std::size_t column) {
  bool any_number = false;
  for (const std::vector<std::string>& row : rows) {
    const bool number = is_number(row[column]);
    if (!number && !is_blank(row[column])) {
      return false;
    }
    any_number = any_number || number;
  }
  return any_number;
}

// Markdown ends a cell at '|', even inside code.
std::string escape_cell(const std::string& cell) {
  COMMON_CHECK(cell.find('\n') == std::string::npos, "a table cell is one line");
  std::string escaped;
  for (const char c : cell) {
    if (c == '|') {
      escaped += '\\';
    }
    escaped += c;
  }
  return escaped;
}

std::string table_line(const std::vector<std::string>& cells, const std::vector<std::size_t>& widths,
                       const std::vector<bool>& align_right) {
  std::string line = "|";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::string padding(widths[i] - display_columns(cells[i]), ' ');
    line += ' ' + (align_right[i] ? padding + cells[i] : cells[i] + padding) + " |";
  }
  return line + '\n';
}

// Backgrounds of the 256-colour palette, ordered so that neighbours differ most; all light enough for black text.
constexpr std::array<int, 12> kOwnerColors = {117, 215, 120, 212, 228, 147, 80, 209, 156, 183, 180, 250};

char owner_letter(int owner) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  if (owner < 0) {
    return '.';
  }
  const auto index = static_cast<std::size_t>(owner);
  return index < kLetters.size() ? kLetters[index] : '#';
}

// SGR 38;5 and 48;5 choose foreground and background; 16 is black whatever the terminal's theme.
std::string start_color(int owner) {
  return format("\033[38;5;16;48;5;%dm", kOwnerColors[static_cast<std::size_t>(owner) % kOwnerColors.size()]);
}

// Bytes of the valid UTF-8 character that `text` opens with, 0 if there is none. The ranges of the second byte, which
// keep out overlong forms, surrogates and values past U+10FFFF, are table 3-7 of the Unicode Standard.
std::size_t character_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(text[i])); };
  const unsigned lead = byte(0);
  if (lead < 0x80U) {
    return 1;
  }
  if (lead < 0xC2U || lead > 0xF4U) {
    return 0;
  }
  const std::size_t length = lead < 0xE0U ? 2 : lead < 0xF0U ? 3 : 4;
  if (text.size() < length) {
    return 0;
  }
  const unsigned lowest = lead == 0xE0U ? 0xA0U : lead == 0xF0U ? 0x90U : 0x80U;
  const unsigned highest = lead == 0xEDU ? 0x9FU : lead == 0xF4U ? 0x8FU : 0xBFU;
  if (byte(1) < lowest || byte(1) > highest) {
    return 0;
  }
  const auto rest = text.substr(2, length - 2);
  return std::all_of(rest.begin(), rest.end(), continues_character) ? length : 0;
}

std::string escape_bytes(std::string_view bytes) {
  std::string escaped;
  for (const char c : bytes) {
    escaped += format("\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
  }
  return escaped;
}

std::string escape_character(std::string_view character) {
  // U+0080 to U+009F are control characters too: terminals may obey them.
  const bool high_control = character.size() == 2 && character[0] == '\xC2' && character[1] < '\xA0';
  if (high_control) {
    return escape_bytes(character);
  }
  if (character.size() > 1) {
    return std::string(character);
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
  const bool printable = character[0] >= ' ' && character[0] <= '~';
  return printable ? std::string(character) : escape_bytes(character);
}

}  // namespace

std::string format(const char* pattern, ...) {
  std::va_list arguments;
  va_start(arguments, pattern);
  std::va_list arguments_again;
  va_copy(arguments_again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(length < 0 ? 0 : static_cast<std::size_t>(length), '\0');
  // Writes the closing zero over the string's own.
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
  // From 999.5 on the number would round to four digits.
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

bool use_color(std::ostream& stream) {
  const char* no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') {
    return false;
  }
  if (&stream == &std::cout) {
    return isatty(STDOUT_FILENO) == 1;
  }
  if (&stream == &std::cerr || &stream == &std::clog) {
    return isatty(STDERR_FILENO) == 1;
  }
  return false;
}

Table::Table(std::vector<std::string> header) : header_(std::move(header)) {
  COMMON_CHECK(!header_.empty(), "a table has at least one column");
  std::transform(header_.begin(), header_.end(), header_.begin(), escape_cell);
}

void Table::add_row(std::vector<std::string> cells) {
  COMMON_CHECK(cells.size() == header_.size(), "a row must have as many cells as the header");
  std::transform(cells.begin(), cells.end(), cells.begin(), escape_cell);
  rows_.push_back(std::move(cells));
}

std::string Table::to_string() const {
  constexpr std::size_t kMinWidth = 3;  // some Markdown readers want three dashes
  std::vector<std::size_t> widths;
  std::vector<bool> align_right;
  std::vector<std::string> dashes;
  for (std::size_t column = 0; column < header_.size(); ++column) {
    std::size_t width = std::max(kMinWidth, display_columns(header_[column]));
    for (const std::vector<std::string>& row : rows_) {
      width = std::max(width, display_columns(row[column]));
    }
    widths.push_back(width);
    align_right.push_back(is_number_column(rows_, column));
    dashes.push_back(align_right.back() ? std::string(width - 1, '-') + ':' : std::string(width, '-'));
  }
  std::string text = table_line(header_, widths, align_right) + table_line(dashes, widths, align_right);
  for (const std::vector<std::string>& row : rows_) {
    text += table_line(row, widths, align_right);
  }
  return text;
}

char count_digit(int count) { return static_cast<char>(count == 0 ? '.' : count < 10 ? '0' + count : '+'); }

std::string draw_cells(std::span<const MapCell> cells, bool color) {
  std::string text;
  int colored_owner = -1;  // whose background is switched on
  for (const MapCell& cell : cells) {
    const int owner = color ? std::max(cell.owner, -1) : -1;
    if (owner != colored_owner) {
      text += owner < 0 ? "\033[0m" : start_color(owner);
      colored_owner = owner;
    }
    text += cell.fill != 0 ? cell.fill : owner_letter(cell.owner);
  }
  return text + (colored_owner < 0 ? "" : "\033[0m");
}

std::string draw_map(std::span<const MapCell> cells, int columns, bool color) {
  COMMON_CHECK(columns > 0, "a map needs at least one column");
  constexpr int kMinIndexWidth = 4;
  const int index_width = std::max(kMinIndexWidth, static_cast<int>(std::to_string(cells.size()).size()));
  const auto row_length = static_cast<std::size_t>(columns);
  std::string text;
  for (std::size_t first = 0; first < cells.size(); first += row_length) {
    text += format("%*zu  ", index_width, first) +
            draw_cells(cells.subspan(first, std::min(row_length, cells.size() - first)), color) + "\n";
  }
  return text;
}

std::string quote(std::string_view text, std::size_t max_length) {
  std::string quoted = "\"";
  std::size_t at = 0;
  while (at < text.size()) {
    // A byte that opens no valid character stands alone.
    const std::size_t length = character_length(text.substr(at));
    const std::size_t step = std::max<std::size_t>(length, 1);
    if (at + step > max_length) {
      break;
    }
    const std::string_view character = text.substr(at, step);
    quoted += length == 0 ? escape_bytes(character) : escape_character(character);
    at += step;
  }
  // Outside the quotes, where it cannot be taken for a part of the text.
  return quoted + (at < text.size() ? "\"..." : "\"");
}

}  // namespace common
