// The prefix cache a piece at a time: hashes, the table, publishing and the lookup, without eviction.
#include "tests/support/catch.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "common/base/check.h"
#include "common/base/tensor.h"
#include "stage6/kv_cache_manager.h"
#include "stage6/prefix_cache.h"

namespace {

using stage6::BlockHash;
using stage6::hash_block;
using stage6::KvCacheManager;
using stage6::PrefixCache;
using Tokens = std::vector<common::Token>;

BlockHash everything_collides(BlockHash /*parent*/, std::span<const common::Token> /*tokens*/, std::uint64_t /*salt*/) {
  return 1;
}

BlockHash sum(BlockHash parent, std::span<const common::Token> tokens, std::uint64_t salt) {
  BlockHash result = 31 * parent + 7 * salt;
  for (const common::Token token : tokens) {
    result = 31 * result + static_cast<BlockHash>(token);
  }
  return result;
}

}  // namespace

TEST_CASE("prefix cache: a block's hash depends on its tokens, on what comes before it, and on the salt") {
  const Tokens tokens = {1, 2, 3, 4};
  const BlockHash plain = hash_block(0, tokens, 0);
  CHECK(hash_block(0, Tokens{1, 2, 4, 3}, 0) != plain);
  CHECK(hash_block(0, Tokens{1, 2, 3, 5}, 0) != plain);
  CHECK(hash_block(1, tokens, 0) != plain);
  CHECK(hash_block(0, tokens, 1) != plain);
  CHECK(hash_block(plain, tokens, 0) != plain);
  CHECK(hash_block(1, tokens, 0) != hash_block(0, tokens, 1));
  CHECK(hash_block(5, tokens, 6) == hash_block(5, Tokens{1, 2, 3, 4}, 6));
  CHECK(hash_block(5, tokens, 6) != hash_block(6, tokens, 5));
}

TEST_CASE("prefix cache: what is published is found, a block at a time, up to the first that is not there") {
  const std::vector<int> none;
  for (const bool collide : {false, true}) {
    PrefixCache cache(2, collide ? everything_collides : sum);
    cache.publish(7, -1, Tokens{1, 2}, 0);
    cache.publish(1, 7, Tokens{3, 4}, 0);
    CHECK(cache.contains(7));
    CHECK(cache.find(Tokens{1, 2, 3, 4, 5}, 0) == std::vector{7, 1});
    CHECK(cache.find(Tokens{1, 2, 3}, 0) == std::vector{7});
    CHECK(cache.find(Tokens{1, 2, 4, 3}, 0) == std::vector{7});
    CHECK(cache.find(Tokens{3, 4}, 0) == none);        // is there, but after 1 2
    CHECK(cache.find(Tokens{5, 6, 1, 2}, 0) == none);  // what comes before is missing
    CHECK(cache.find(Tokens{1, 2}, 1) == none);        // another tenant's
    cache.publish(2, -1, Tokens{1, 2}, 1);
    CHECK(cache.find(Tokens{1, 2, 3, 4}, 1) == std::vector{2});
    CHECK(cache.find(Tokens{1, 2, 3, 4}, 0) == std::vector{7, 1});
    CHECK(cache.find(Tokens{1}, 0) == none);  // not a full block
    cache.publish(3, 9, Tokens{5, 6}, 0);     // its parent is unknown
    CHECK_FALSE(cache.contains(3));
  }
}

TEST_CASE("prefix cache: what is published after one text is not found after another that collides with it") {
  const auto text = [](std::string_view characters) { return Tokens(characters.begin(), characters.end()); };
  PrefixCache cache(4, everything_collides);
  cache.publish(7, -1, text("cats"), 0);
  cache.publish(1, 7, text("_eat"), 0);
  cache.publish(3, -1, text("dogs"), 0);
  cache.publish(6, 3, text("_eat"), 0);
  CHECK(cache.find(text("dogs_eat_fish"), 0) == std::vector{3, 6});
  CHECK(cache.find(text("cats_eat_fish"), 0) == std::vector{7, 1});
}

TEST_CASE("prefix cache: what is published is a full block, and is published once") {
  PrefixCache cache(2, sum);
  cache.publish(3, -1, Tokens{1, 2}, 0);
  CHECK_THROWS_AS(cache.publish(3, -1, Tokens{1, 2}, 0), common::CheckError);
  CHECK_THROWS_AS(cache.publish(4, -1, Tokens{1}, 0), common::CheckError);
  CHECK(cache.find(Tokens{1, 2}, 0) == std::vector{3});
}

TEST_CASE("prefix cache: what is published with equal contents goes on from either block") {
  PrefixCache cache(2, sum);
  cache.publish(0, -1, Tokens{1, 2}, 0);
  cache.publish(1, -1, Tokens{1, 2}, 0);
  cache.publish(2, 1, Tokens{3, 4}, 0);
  CHECK(cache.find(Tokens{1, 2, 3, 4}, 0) == std::vector{0, 2});
}

TEST_CASE("prefix cache: commit publishes a block when it is full, and not before") {
  KvCacheManager manager(8, 4, sum);
  REQUIRE(manager.allocate(0, 10));
  const std::vector<int> table = manager.block_table(0);
  manager.commit(0, Tokens{1, 2, 3});
  CHECK_FALSE(manager.prefix_cache().contains(table[0]));
  manager.commit(0, Tokens{4, 5, 6, 7, 8, 9});
  CHECK(manager.prefix_cache().contains(table[0]));
  CHECK(manager.prefix_cache().contains(table[1]));
  CHECK_FALSE(manager.prefix_cache().contains(table[2]));
  CHECK(manager.prefix_cache().find(Tokens{1, 2, 3, 4, 5, 6, 7, 8}, 0) == std::vector{table[0], table[1]});
  manager.commit(0, Tokens{10, 11, 12});
  CHECK(manager.prefix_cache().find(Tokens{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 0) == table);
}

TEST_CASE("prefix cache: commit never publishes a block of which some tokens are unknown, nor one behind it") {
  KvCacheManager manager(8, 4, sum);
  REQUIRE(manager.allocate(0, 12));
  manager.commit(0, 2);
  manager.commit(0, Tokens{3, 4, 5, 6, 7, 8, 9, 10});
  for (const int block : manager.block_table(0)) {
    CHECK_FALSE(manager.prefix_cache().contains(block));
  }
}

TEST_CASE("prefix cache: allocate starts with the blocks that are there, and leaves one token to compute") {
  KvCacheManager manager(8, 2, sum);
  const Tokens text = {1, 2, 3, 4};
  REQUIRE(manager.allocate(0, text, 0));
  CHECK(manager.length(0) == 0);
  manager.commit(0, text);
  const std::vector<int> table = manager.block_table(0);
  REQUIRE(manager.allocate(1, text, 0));
  CHECK(manager.length(1) == 2);  // all four are there
  REQUIRE(manager.allocate(2, Tokens{1, 2, 3, 4, 5}, 0));
  CHECK(manager.length(2) == 4);
  CHECK(manager.reference_count(table[0]) == 3);
  CHECK(manager.reference_count(table[1]) == 2);
  CHECK(manager.capacity(2) == 6);
  CHECK(manager.prefix_cache().statistics().hits == 2);
  CHECK(manager.prefix_cache().statistics().tokens_saved == 6);
}

TEST_CASE("prefix cache: allocate that is refused changes nothing, statistics included") {
  KvCacheManager manager(3, 2, sum);
  REQUIRE(manager.allocate(0, Tokens{1, 2, 3}, 0));
  manager.commit(0, Tokens{1, 2, 3});
  const std::vector<int> free_blocks = manager.free_blocks();
  CHECK_FALSE(manager.allocate(1, Tokens{1, 2, 3, 4, 5, 6}, 0));  // one block is found, and two more are needed
  CHECK_FALSE(manager.contains(1));
  CHECK(manager.free_blocks() == free_blocks);
  CHECK(manager.reference_count(manager.block_table(0)[0]) == 1);
  CHECK(manager.prefix_cache().statistics().lookups == 1);
  CHECK(manager.allocate(1, Tokens{1, 2, 3, 4}, 0));
}
