// Maps of the cache: one character for each slot or block, in colour on a terminal.
#pragma once

#include <span>
#include <string>

namespace common {

// One cell of a cache map: how a slot or block looks.
struct MapCell {
  int color = -1;   // picks the background, from 0 up; different numbers look different; negative: none
  char fill = '.';  // the character drawn
};

// The letter of owner 0, 1, …: A, B, … Z, a … z, then '#'; '.' for a negative owner.
char owner_letter(int owner);

// How a map shows a small number: a digit, '.' for 0, '+' from 10 up.
char count_digit(int count);

// Draws the cells in one line, without a line end: "AAAA..BB". Without color, the characters alone are drawn.
std::string draw_cells(std::span<const MapCell> cells, bool color);

// Draws the cells in rows of `columns`. A row begins with the index of its first cell: "   0  AAAA..BB".
std::string draw_map(std::span<const MapCell> cells, int columns, bool color);

}  // namespace common
