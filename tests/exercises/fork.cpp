// fork by itself: tables and numbers of owners, with nothing freed and nothing copied.
#include "tests/support/catch.h"

#include <vector>

#include "common/base/check.h"
#include "stage5/kv_cache_manager.h"

using stage5::KvCacheManager;

TEST_CASE("a fork: the child has its parent's tokens, in its parent's blocks") {
  KvCacheManager manager(8, 4);
  REQUIRE(manager.allocate(0, 10));
  manager.commit(0, 10);
  const std::vector<int> table = manager.block_table(0);
  const std::vector<int> free_blocks = manager.free_blocks();
  manager.fork(0, 1);
  CHECK(manager.block_table(1) == table);
  CHECK(manager.length(1) == 10);
  CHECK(manager.block_table(0) == table);
  CHECK(manager.length(0) == 10);
  CHECK(manager.free_blocks() == free_blocks);  // none is taken
  CHECK(manager.pending_copies().empty());      // and no float will move
}

TEST_CASE("a fork: each block counts the tables that it stands in") {
  KvCacheManager manager(8, 4);
  REQUIRE(manager.allocate(0, 10));
  manager.commit(0, 10);
  manager.fork(0, 1);
  manager.fork(1, 2);  // a child has children too
  manager.fork(0, 3);
  for (const int block : manager.block_table(0)) {
    CHECK(manager.reference_count(block) == 4);
  }
  for (const int block : manager.free_blocks()) {
    CHECK(manager.reference_count(block) == 0);
  }
}

TEST_CASE("a fork: what the parent has reserved ahead stays its own") {
  KvCacheManager manager(8, 4);
  REQUIRE(manager.allocate(0, 11));
  manager.commit(0, 5);
  const std::vector<int> table = manager.block_table(0);
  REQUIRE(table.size() == 3);
  manager.fork(0, 1);
  CHECK(manager.block_table(0) == table);
  CHECK(manager.block_table(1) == std::vector{table[0], table[1]});
  CHECK(manager.reference_count(table[1]) == 2);
  CHECK(manager.reference_count(table[2]) == 1);
}

TEST_CASE("a fork: a child that is live already is an error, and nothing has changed") {
  KvCacheManager manager(8, 4);
  REQUIRE(manager.allocate(0, 4));
  manager.commit(0, 4);
  manager.fork(0, 1);
  CHECK_THROWS_AS(manager.fork(0, 1), common::CheckError);
  CHECK_THROWS_AS(manager.fork(0, 0), common::CheckError);
  CHECK(manager.reference_count(manager.block_table(0).front()) == 2);
}
