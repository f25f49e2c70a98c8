// Text tables and maps of the cache.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "common/app/block_map.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/messages.h"

namespace {

using common::CheckError;
using common::MapCell;
using common::Table;
using tests::contains;

}  // namespace

TEST_CASE("table: numbers align right, text left, as Markdown") {
  Table table({"stage", "slots", "waste", "note"});
  table.add_row({"1", "1,234", "93.8 %", "contiguous"});
  table.add_row({"22", "7", "-", "2 of 3 blocks"});
  table.add_row({"3", "-12.5 KiB", "", "x"});
  CHECK(table.to_string() ==
        "| stage |     slots |  waste | note          |\n"
        "| ----: | --------: | -----: | ------------- |\n"
        "|     1 |     1,234 | 93.8 % | contiguous    |\n"
        "|    22 |         7 |      - | 2 of 3 blocks |\n"
        "|     3 | -12.5 KiB |        | x             |\n");
}

TEST_CASE("table: what counts as a number") {
  // A single cell makes its column a number column exactly if the line of dashes ends in a colon.
  const auto is_number = [](const std::string& cell) {
    Table table({"h"});
    table.add_row({cell});
    return contains(table.to_string(), ": |");
  };
  for (const char* number :
       {"0", "-3", "+1.5", ".5", "1,000", "1,234 tokens", "22.5 KiB", "93.8 %", "4x", "16 tokens/s", "2.5ms"}) {
    CAPTURE(number);
    CHECK(is_number(number));
  }
  for (const char* text : {"", "-", "stage1", "[7, 1, 3]", "2 of 3", "KiB 3", "- 3", "+", ".", "a"}) {
    CAPTURE(text);
    CHECK_FALSE(is_number(text));
  }
}

TEST_CASE("table: cells count display columns, not bytes") {
  Table table({"größe", "é"});
  table.add_row({"…", "1 µs"});
  table.add_row({"日本", "10 ms"});
  CHECK(table.to_string() ==
        "| größe |     é |\n"
        "| ----- | ----: |\n"
        "| …     |  1 µs |\n"
        "| 日本    | 10 ms |\n");
}

TEST_CASE("table: edges") {
  // No rows is all text; dashes are at least three; a bar inside a cell would end it.
  CHECK(Table({"a", "long"}).to_string() == "| a   | long |\n| --- | ---- |\n");
  Table bars({"a|b"});
  bars.add_row({"|"});
  CHECK(bars.to_string() == "| a\\|b |\n| ---- |\n| \\|   |\n");
  Table table({"a", "b"});
  CHECK_THROWS_AS(table.add_row({"1"}), CheckError);
  CHECK_THROWS_AS(table.add_row({"1", "2", "3"}), CheckError);
  CHECK_THROWS_AS(table.add_row({"1", "2\n"}), CheckError);
  CHECK_THROWS_AS(Table({}), CheckError);
}

namespace {

std::vector<MapCell> cells_of(const std::vector<int>& owners) {
  std::vector<MapCell> cells(owners.size());
  std::transform(owners.begin(), owners.end(), cells.begin(),
                 [](int owner) { return MapCell{.color = owner, .fill = common::owner_letter(owner)}; });
  return cells;
}

}  // namespace

TEST_CASE("draw_map: letters in rows that open with an index") {
  const std::vector<MapCell> cells = cells_of({0, 0, 0, 0, -1, -1, 1, 1, 25, 26, 51});
  CHECK(common::draw_map(cells, 8, false) == "   0  AAAA..BB\n   8  Zaz\n");
  CHECK(common::draw_map(cells, 11, false) == "   0  AAAA..BBZaz\n");
  CHECK(common::draw_map(cells_of({52, 1000, -7}), 8, false) == "   0  ##.\n");
  CHECK(common::draw_map({}, 8, false).empty());
  CHECK_THROWS_AS(common::draw_map(cells, 0, false), CheckError);
}

TEST_CASE("draw_map: the colour and the character are independent") {
  const std::vector<MapCell> cells = {{.color = 0, .fill = '3'}, {.color = 0, .fill = '_'}, {.fill = 'x'}, {}};
  CHECK(common::draw_map(cells, 4, false) == "   0  3_x.\n");
}

TEST_CASE("draw_map: indexes widen together beyond four digits") {
  const std::string map = common::draw_map(std::vector<MapCell>(10001), 5000, false);
  CHECK(map.substr(0, 8) == "    0  .");
  CHECK(contains(map, "\n 5000  ."));
  CHECK(contains(map, "\n10000  .\n"));
}

TEST_CASE("draw_map: with color each number has a background, a negative one none, and rows end with a reset") {
  const std::string on_a = "\033[38;5;16;48;5;117m";
  const std::string on_b = "\033[38;5;16;48;5;215m";
  CHECK(common::draw_map(cells_of({0, 0, 1, -1, -1, 1, 1, 0}), 6, true) ==
        "   0  " + on_a + "AA" + on_b + "B\033[0m.." + on_b + "B\033[0m\n   6  " + on_b + "B" + on_a + "A\033[0m\n");
  CHECK(common::draw_map(cells_of({-1, -2}), 6, true) == "   0  ..\n");

  // A dozen neighbours differ by colour alone.
  std::set<std::string> looks;
  for (int color = 0; color < 12; ++color) {
    const std::vector<MapCell> cells = {{.color = color, .fill = '*'}};
    looks.insert(common::draw_map(cells, 1, true));
  }
  CHECK(looks.size() == 12);
}
