// Text tables, as the programs print them.
#pragma once

#include <string>
#include <vector>

namespace common {

// A header, then rows. Columns of numbers are aligned right, others left. Widths are in characters, not bytes (UTF-8).
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add_row(std::vector<std::string> cells);  // as many cells as the header has
  // A Markdown table: "| stage | slots |", a line of dashes (with ':' on the right for columns of numbers), the rows.
  std::string to_string() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace common
