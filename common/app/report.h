// What the programs print: text tables, maps of the cache in colour, numbers with units.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace common {

// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string format_bytes(std::int64_t bytes);           // "896 B", "22.5 KiB", "1.56 GiB": three significant digits
std::string format_count(std::int64_t count);           // "1,234,567"
std::string format_list(std::span<const int> numbers);  // "[7, 1, 3]"
std::string format_percent(double part, double whole);  // "93.8 %"; "-" when whole is 0

// True if `stream` (stdout or stderr) is a terminal and NO_COLOR is unset or empty (https://no-color.org).
bool use_color(std::ostream& stream);

// A text table: a header, then rows; numbers align right, text left. Cells count display columns, not bytes (UTF-8).
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add_row(std::vector<std::string> cells);  // as many cells as the header has
  // Markdown-compatible: "| stage | slots |", a line of dashes (with ':' on the right for number columns), the rows.
  std::string to_string() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// One cell of a cache map: who owns a slot or block, and how it looks.
struct MapCell {
  int owner = -1;  // an index from 0, which picks letter and colour; negative: nobody
  char fill = 0;   // the character drawn; 0: the owner's letter (A, B, … Z, a … z, then '#'), '.' for nobody
};

// How a map shows a small number: a digit, '.' for 0, '+' from 10 up.
char count_digit(int count);

// Draws the cells in one line, without a line end: "AAAA..BB". With color, each owner has a background colour of its
// own; without, the characters say it all.
std::string draw_cells(std::span<const MapCell> cells, bool color);

// Draws the cells in rows of `columns`, each row opening with the index of its first cell: "   0  AAAA..BB".
std::string draw_map(std::span<const MapCell> cells, int columns, bool color);

// `text` as a C-like one-line string for messages: quoted, with \n and control bytes escaped, cut after max_length
// bytes (at a character boundary) with "...".
std::string quote(std::string_view text, std::size_t max_length = 80);

}  // namespace common
