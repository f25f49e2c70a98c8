// Maps of the cache: one character for each slot or block, in colour on a terminal.
#pragma once

#include <span>
#include <string>

namespace common {

// One cell of a cache map: the owner of a slot or block, and the character that is drawn.
struct MapCell {
  int owner = -1;  // an index from 0, which selects letter and colour; negative: none
  char fill = 0;   // the character drawn; 0: the owner's letter (A, B, … Z, a … z, then '#'), '.' without an owner
};

// How a map shows a small number: a digit, '.' for 0, '+' from 10 up.
char count_digit(int count);

// Draws the cells in one line, without a line end: "AAAA..BB". With color, each owner also has a background colour.
std::string draw_cells(std::span<const MapCell> cells, bool color);

// Draws the cells in rows of `columns`. A row begins with the index of its first cell: "   0  AAAA..BB".
std::string draw_map(std::span<const MapCell> cells, int columns, bool color);

}  // namespace common
