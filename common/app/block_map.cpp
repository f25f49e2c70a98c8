#include "common/app/block_map.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

// Backgrounds of the 256-colour palette, ordered so that neighbours differ most; all light enough for black text.
constexpr std::array<int, 12> kBackgrounds = {117, 215, 120, 212, 228, 147, 80, 209, 156, 183, 180, 250};

// SGR 38;5 and 48;5 choose foreground and background; 16 is black whatever the terminal's theme.
std::string start_color(int color) {
  return format("\033[38;5;16;48;5;%dm", kBackgrounds[static_cast<std::size_t>(color) % kBackgrounds.size()]);
}

}  // namespace

char owner_letter(int owner) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  if (owner < 0) {
    return '.';
  }
  const auto index = static_cast<std::size_t>(owner);
  return index < kLetters.size() ? kLetters[index] : '#';
}

char count_digit(int count) { return static_cast<char>(count == 0 ? '.' : count < 10 ? '0' + count : '+'); }

std::string draw_cells(std::span<const MapCell> cells, bool color) {
  std::string text;
  int current = -1;  // the background that is switched on
  for (const MapCell& cell : cells) {
    const int wanted = color ? std::max(cell.color, -1) : -1;
    if (wanted != current) {
      text += wanted < 0 ? "\033[0m" : start_color(wanted);
      current = wanted;
    }
    text += cell.fill;
  }
  return text + (current < 0 ? "" : "\033[0m");
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
