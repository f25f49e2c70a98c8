#include "common/app/block_map.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

// Background colours of the 256-colour palette, all light enough for black text. Neighbours differ most.
constexpr std::array<int, 12> kOwnerColors = {117, 215, 120, 212, 228, 147, 80, 209, 156, 183, 180, 250};

char owner_letter(int owner) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  if (owner < 0) {
    return '.';
  }
  const auto index = static_cast<std::size_t>(owner);
  return index < kLetters.size() ? kLetters[index] : '#';
}

// SGR 38;5 and 48;5 select foreground and background; 16 is black in every terminal theme.
std::string start_color(int owner) {
  return format("\033[38;5;16;48;5;%dm", kOwnerColors[static_cast<std::size_t>(owner) % kOwnerColors.size()]);
}

}  // namespace

char count_digit(int count) { return static_cast<char>(count == 0 ? '.' : count < 10 ? '0' + count : '+'); }

std::string draw_cells(std::span<const MapCell> cells, bool color) {
  std::string text;
  int colored_owner = -1;  // the owner whose background is on
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

}  // namespace common
