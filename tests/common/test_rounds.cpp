// The table of rounds, which sees only an engine's drawn tokens and the manager's books.
#include "common/app/rounds.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace {

struct Usage {
  int total = 0;
  int reserved = 0;
};

// Six blocks of four slots. lengths: by sequence.
struct Books {
  std::map<int, int> lengths;

  std::vector<int> sequences() const {
    std::vector<int> result;
    for (const auto& [sequence, length] : lengths) {
      result.push_back(sequence);
    }
    return result;
  }
  int length(int sequence) const { return lengths.at(sequence); }
  std::vector<int> block_table(int sequence) const {
    return std::vector<int>(static_cast<std::size_t>((length(sequence) + 3) / 4));
  }
  Usage usage() const {
    Usage usage{24, 0};
    for (const int sequence : sequences()) {
      usage.reserved += 4 * static_cast<int>(block_table(sequence).size());
    }
    return usage;
  }
  static int block_size() { return 4; }
};

}  // namespace

TEST_CASE("rounds: preempted for another, preempted by its own need, ended, resumed") {
  common::RoundTable table;
  const auto draw = [&](int request, std::map<int, int> lengths) { table.add(request, Books{std::move(lengths)}); };
  draw(0, {{0, 4}});
  draw(1, {{0, 4}, {1, 8}});
  draw(2, {{0, 4}, {1, 8}, {2, 9}});
  draw(0, {{0, 5}, {1, 8}});  // a block for 0: 2 is preempted
  draw(1, {{0, 5}, {1, 9}});
  draw(0, {{0, 6}, {1, 9}});  // and then 1, which finds no block in its own turn
  draw(0, {{0, 7}});          // 0 ends: the next turn is a later request's, in a new round
  draw(1, {{1, 10}});
  draw(2, {{1, 10}, {2, 10}});
  CHECK(table.to_string() ==
        "| round | what happens                                             | running | free blocks |\n"
        "| ----: | -------------------------------------------------------- | ------: | ----------: |\n"
        "|     1 | 0 to 2 are admitted                                      |       3 |           0 |\n"
        "|     2 | 2 is preempted for 0: 9 tokens in 3 blocks               |       2 |           1 |\n"
        "|     3 | 1 is preempted for lack of a block: 9 tokens in 3 blocks |       1 |           1 |\n"
        "|     4 | 0 ends                                                   |       1 |           4 |\n"
        "|     5 | 1 and 2 are admitted; 1 and 2 end                        |       2 |           0 |\n");
}

TEST_CASE("rounds: several are preempted in one round, the latest arrival first") {
  common::RoundTable table;
  const auto draw = [&](int request, std::map<int, int> lengths) { table.add(request, Books{std::move(lengths)}); };
  draw(0, {{0, 4}});
  draw(1, {{0, 4}, {1, 4}});
  draw(2, {{0, 4}, {1, 4}, {2, 4}});
  draw(0, {{0, 5}});
  draw(1, {{1, 5}});
  draw(2, {{1, 5}, {2, 5}});
  const std::string text = table.to_string();
  CHECK(text.find("2 is preempted for 0: 4 tokens in 1 block; 1 is preempted for 0: 4 tokens in 1 block; 0 ends") !=
        std::string::npos);
  CHECK(text.find("1 and 2 are admitted; 1 and 2 end") != std::string::npos);
}
