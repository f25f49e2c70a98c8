// Which sequences of a step read their common blocks together.
#include "common/paged/shared_reading.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/step_tables.h"

using common::ReadingCosts;
using common::SharedPrefix;
using tests::Sequence;

namespace {

constexpr ReadingCosts kFree{.block = 1};

// "0 1: 2 blocks", a line for each group.
std::string found(const std::vector<Sequence>& sequences, const ReadingCosts& costs = kFree) {
  const tests::Step step(sequences, 4);
  std::string text;
  for (const SharedPrefix& group : common::find_shared_prefixes(step.tables(), costs)) {
    for (const int sequence : group.sequences) {
      text += std::to_string(sequence) + " ";
    }
    text += "share " + std::to_string(group.num_blocks) + "\n";
  }
  return text;
}

}  // namespace

TEST_CASE("shared reading: sequences that begin with the same blocks are a group") {
  CHECK(found({{{7, 1, 3}, 10}, {{7, 1, 5}, 11}}) == "0 1 share 2\n");
  CHECK(found({{{7, 1, 3}, 10}, {{2, 1, 3}, 10}}).empty());  // the same block elsewhere is another text's
  CHECK(found({{{7, 1, 3}, 10}}).empty());
  CHECK(found({}).empty());
  CHECK(found({{{4, 2}, 6}, {{7, 1, 3}, 10}, {{4, 6}, 7}, {{7, 1, 5}, 9}}) == "0 2 share 1\n1 3 share 2\n");
}

TEST_CASE("shared reading: all new tokens see the shared blocks whole") {
  CHECK(found({{{7, 1, 3}, 9}, {{7, 1, 5}, 9}}) == "0 1 share 2\n");
  CHECK(found({{{7, 1}, 8}, {{7, 1, 5}, 9}}) == "0 1 share 1\n");  // the first one writes block 1 now
  CHECK(found({{{7, 1, 3}, 12, 5}, {{7, 1, 5}, 9}}) == "0 1 share 1\n");
  CHECK(found({{{7, 1, 3}, 12, 4}, {{7, 1, 5}, 9}}) == "0 1 share 2\n");
  CHECK(found({{{7, 1, 3}, 10, 10}, {{7, 1, 5}, 9}}).empty());  // a whole prompt
}

TEST_CASE("shared reading: a sequence that is left out, or has no tokens, is in no group") {
  CHECK(found({{{7, 1, 3}, 0}, {{7, 1, 5}, 9}, {{7, 1, 6}, 9}}) == "1 2 share 2\n");
  CHECK(found({{{7, 1, 3}, 9, 0}, {{7, 1, 5}, 9}}).empty());
}

TEST_CASE("shared reading: of nested prefixes, the groups that save most") {
  // All share one block, two pairs share three: 2 x 3 blocks not read again, as against 5 - 1.
  const std::vector<Sequence> nested = {
      {{9, 1, 2, 10}, 13}, {{9, 1, 2, 11}, 13}, {{9, 3, 4, 12}, 13}, {{9, 3, 4, 13}, 13}, {{9, 14}, 6}};
  CHECK(found(nested) == "0 1 share 3\n2 3 share 3\n");
  // Six that share two blocks save 5 x 2, and the pair that shares a third one would save 3 and 3 x 2.
  std::vector<Sequence> broad = {{{9, 1, 2, 10}, 13}, {{9, 1, 2, 11}, 13}};
  for (int i = 0; i < 4; ++i) {
    broad.push_back({{9, 1, 20 + i}, 10});
  }
  CHECK(found(broad) == "0 1 2 3 4 5 share 2\n");
  // In a chain of beams, each shares one block more with the next one.
  CHECK(found({{{1, 2, 3, 4, 5}, 17}, {{1, 2, 3, 4, 6}, 17}, {{1, 2, 3, 7}, 13}, {{1, 2, 8}, 9}, {{1, 9}, 5}}) ==
        "0 1 2 share 3\n3 4 share 1\n");
}

TEST_CASE("shared reading: a group that costs as much as it saves is none") {
  const std::vector<Sequence> pair = {{{7, 1, 3}, 10}, {{7, 1, 5}, 10}};  // 2 blocks are not read again
  CHECK(found(pair, {.block = 10, .query = 9}) == "0 1 share 2\n");
  CHECK(found(pair, {.block = 10, .query = 10}).empty());
  CHECK(found(pair, {.block = 10, .group = 19}) == "0 1 share 2\n");
  CHECK(found(pair, {.block = 10, .group = 20}).empty());
  // A third one with many new tokens stays outside.
  std::vector<Sequence> three = pair;
  three.push_back({{7, 1, 6, 8, 4}, 18, 10});
  CHECK(found(three, {.block = 10, .query = 1}) == "0 1 2 share 2\n");
  CHECK(found(three, {.block = 10, .query = 2}) == "0 1 share 2\n");
}

TEST_CASE("shared reading: bytes of a layer") {
  // 32 query heads over 8 kv heads of 128 dimensions, 16 tokens in a block, bfloat16.
  const ReadingCosts costs = common::reading_costs(32, 8, 128, 16, 2);
  CHECK(costs.block == 2 * 8 * 16 * 128 * 2);
  CHECK(costs.query == 2 * 2 * 2 * 32 * 130 * 4);  // two partial results, written and read, and all that twice
  CHECK(costs.group == 0);
}

TEST_CASE("shared reading: blocks that are not read again") {
  CHECK(common::num_blocks_saved({}) == 0);
  const std::vector<SharedPrefix> groups = {{{0, 2, 3}, 5}, {{1, 4}, 7}};
  CHECK(common::num_blocks_saved(groups) == 2 * 5 + 1 * 7);
}

TEST_CASE("shared reading: long tables that differ anywhere") {
  constexpr int kBlocks = 300;
  for (const int difference : {0, 1, 63, 64, 65, 127, 128, 129, 298, 299}) {
    Sequence left{{}, 4 * kBlocks};
    for (int block = 0; block < kBlocks; ++block) {
      left.table.push_back(block);
    }
    Sequence right = left;
    right.table[static_cast<std::size_t>(difference)] = 1000;
    const int shared = std::min(difference, kBlocks - 1);
    CHECK(found({left, right}) == (shared == 0 ? "" : "0 1 share " + std::to_string(shared) + "\n"));
  }
}

TEST_CASE("shared reading: arrays that are too short are refused") {
  const tests::Step step({{{7, 1, 3}, 10}, {{7, 1, 5}, 10}}, 4);
  common::StepTables tables = step.tables();
  tables.query_starts = tables.query_starts.first(2);
  CHECK_THROWS_AS(common::find_shared_prefixes(tables, kFree), common::CheckError);
  tables = step.tables();
  tables.table_starts = tables.table_starts.first(1);
  CHECK_THROWS_AS(common::find_shared_prefixes(tables, kFree), common::CheckError);
  CHECK_THROWS_AS(common::find_shared_prefixes(step.tables(), {}), common::CheckError);
}
