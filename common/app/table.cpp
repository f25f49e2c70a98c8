#include "common/app/table.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "common/base/check.h"

namespace common {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Bytes 10xxxxxx continue a UTF-8 character; every other byte begins one.
bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

// Counts each code point as one column, which is right for everything that this project prints.
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

// A missing number. It does not decide how its column is aligned.
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

}  // namespace

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
  constexpr std::size_t kMinWidth = 3;  // some Markdown renderers require three dashes
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

}  // namespace common
