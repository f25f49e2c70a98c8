// Swapping as the manager does it: what is swapped out is still live, and still counts. Compiled for stage 8.
#include "tests/support/catch.h"

#include <string>
#include <vector>

#include "common/model/generation.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/number_pool.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

using common::Token;
using stage::KvCacheManager;
using tests::check_ledger;
using tests::count_from;
using tests::is_refused_as_a_bug;
using tests::NumberPool;
using tests::Numbers;
using tests::take_snapshot;

namespace {

const std::string kNoProblem;
using Tokens = std::vector<Token>;
using Ids = std::vector<int>;

}  // namespace

TEST_CASE("swap: the id of a swapped-out sequence is live: neither allocate nor fork takes it") {
  KvCacheManager manager = tests::make_manager(8, 4, 4);
  REQUIRE(manager.allocate(1, 4));
  manager.commit(1, 4);
  REQUIRE(manager.swap_out(Ids{1}));
  REQUIRE(manager.allocate(2, 4));
  CHECK(is_refused_as_a_bug([&] { manager.allocate(1, 8); }));
  CHECK(is_refused_as_a_bug([&] { manager.allocate(1, Tokens{1, 2, 3}); }));
  CHECK(is_refused_as_a_bug([&] { manager.fork(2, 1); }));
  manager.free(2);
  REQUIRE(manager.swap_in(Ids{1}));
  manager.free(1);
  CHECK(manager.free_blocks().size() == 8);
  CHECK(manager.num_free_host_blocks() == 4);
  CHECK(check_ledger(manager, 8, 4) == kNoProblem);
}

TEST_CASE("swap: resetting the prefix cache reaches what is swapped out") {
  const Tokens text = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  KvCacheManager manager = tests::make_manager(8, 4, 4);
  REQUIRE(manager.allocate(1, text));
  manager.commit(1, text);
  REQUIRE(manager.swap_out(Ids{1}));
  manager.reset_prefix_cache();
  REQUIRE(manager.swap_in(Ids{1}));
  REQUIRE(manager.reserve(1, 2));
  manager.commit(1, Tokens{11, 12});  // fills the third block, which was begun before the reset
  manager.free(1);
  REQUIRE(manager.allocate(2, text));
  CHECK(manager.length(2) == 0);
  CHECK(check_ledger(manager, 8, 4) == kNoProblem);
}

TEST_CASE("swap: misuse is noticed before anything has changed") {
  KvCacheManager manager = tests::make_manager(8, 4, 8);
  for (const int sequence : {1, 2, 3}) {
    REQUIRE(manager.allocate(sequence, 6));
    manager.commit(sequence, 6);
  }
  REQUIRE(manager.swap_out(Ids{3}));
  const tests::Snapshot before = take_snapshot(manager);
  const auto pending = manager.pending_copies().size();
  // After each: what the next one meets would depend on what this one has changed.
  const auto check_is_refused = [&](const std::string& misuse, const auto& run) {
    CAPTURE(misuse);
    CHECK(is_refused_as_a_bug(run));
    CHECK(take_snapshot(manager) == before);
    CHECK(manager.pending_copies().size() == pending);
    CHECK(manager.is_swapped(3));
    CHECK(manager.num_free_host_blocks() == 6);
  };
  check_is_refused("one given twice", [&] { manager.swap_out(Ids{1, 1}); });
  check_is_refused("one is out already", [&] { manager.swap_out(Ids{1, 3}); });
  check_is_refused("one that is not there", [&] { manager.swap_out(Ids{2, 9}); });
  check_is_refused("one is not out", [&] { manager.swap_in(Ids{3, 1}); });
  check_is_refused("back twice", [&] { manager.swap_in(Ids{3, 3}); });
  check_is_refused("max_tokens -1", [&] { manager.allocate(4, Tokens{1, 2}, 0, {.max_tokens = -1}); });
  check_is_refused("max_tokens 0", [&] { manager.allocate(4, Tokens{1, 2}, 0, {.max_tokens = 0}); });
  check_is_refused("spare_blocks -1", [&] { manager.allocate(4, Tokens{1, 2}, 0, {.spare_blocks = -1}); });
}

TEST_CASE("swap: a block that is found in the step that swaps it back in holds its K and V") {
  const Tokens text = {1, 2, 3, 4, 5};
  NumberPool pool(6, 2, 4);
  KvCacheManager& manager = pool.manager();
  pool.start_text(1, text);
  REQUIRE(manager.swap_out(Ids{1}));
  // Another sequence needs all blocks, and overwrites them.
  REQUIRE(manager.allocate(7, 12));
  pool.execute_copies();
  pool.write(7, Numbers(12, 77.0F));
  manager.free(7);

  REQUIRE(manager.swap_in(Ids{1}));
  REQUIRE(manager.allocate(2, text));  // in the same step, before the copy has been carried out
  REQUIRE(manager.length(2) == 4);
  pool.execute_copies();
  CHECK(pool.read(2) == count_from(1, 4));
}

TEST_CASE("swap: a shared block moves once, and has the same owners again (stage 8, invariant 6)") {
  KvCacheManager manager = tests::make_manager(8, 4, 6);
  REQUIRE(manager.allocate(0, 6));
  manager.commit(0, 6);
  manager.fork(0, 1);
  manager.fork(0, 2);
  REQUIRE(manager.reserve(2, 1));
  manager.commit(2, 1);
  tests::take_copies(manager);
  const std::vector<int> group = {0, 1, 2};
  const std::vector<int> before = manager.block_table(0);
  CHECK(manager.usage_of(group).reserved == 12);
  CHECK(manager.usage_of(group).used == 9);  // 4 shared, 2 of two sequences, 3 of the third
  REQUIRE(manager.swap_out(group));
  CHECK(tests::take_copies(manager).size() == 3);
  CHECK(manager.usage().reserved == 0);
  CHECK(manager.num_free_host_blocks() == 3);
  CHECK(manager.sequences().empty());
  CHECK(tests::is_refused_as_a_bug([&] { manager.reserve(0, 1); }));

  REQUIRE(manager.allocate(7, 4 * 5));  // another sequence gets blocks meanwhile
  REQUIRE(manager.swap_in(group));
  const std::vector<stage::BlockCopy> copies = tests::take_copies(manager);
  CHECK(copies.size() == 3);
  for (const stage::BlockCopy& copy : copies) {
    CHECK(copy.source >= 8);
    CHECK(copy.destination < 8);
  }
  CHECK(manager.num_free_host_blocks() == 6);
  CHECK(manager.block_table(0) == manager.block_table(1));
  CHECK(manager.reference_count(manager.block_table(0)[0]) == 3);
  CHECK(manager.reference_count(manager.block_table(0)[1]) == 2);
  CHECK(manager.reference_count(manager.block_table(2)[1]) == 1);
  CHECK(manager.length(2) == 7);
  CHECK(check_ledger(manager, 8, 4) == kNoProblem);
}

TEST_CASE("swap: a block of which another sequence is an owner too stays with that one") {
  const Tokens text = {1, 2, 3, 4, 5};
  NumberPool pool(6, 2, 4);
  KvCacheManager& manager = pool.manager();
  pool.start_text(0, text);
  pool.start_text(1, text);
  REQUIRE(manager.usage().reserved == 8);  // two blocks of both, and one of each
  REQUIRE(manager.swap_out(Ids{1}));
  CHECK(manager.reference_count(manager.block_table(0)[0]) == 1);
  CHECK(check_ledger(manager, 6, 2) == kNoProblem);
  pool.execute_copies();
  REQUIRE(manager.allocate(2, 6));  // all blocks that 0 does not own
  pool.write(2, Numbers(6, 77.0F));
  CHECK(pool.read(0) == count_from(1, 5));
  manager.free(2);
  REQUIRE(manager.swap_in(Ids{1}));
  pool.execute_copies();
  CHECK(pool.read(1) == count_from(1, 5));
  CHECK(manager.reference_count(manager.block_table(1)[0]) == 1);
  manager.free(1);
  CHECK(manager.num_free_host_blocks() == 4);
}

TEST_CASE("swap: what is out at the same time has host blocks of its own") {
  NumberPool pool(4, 2, 4);
  KvCacheManager& manager = pool.manager();
  pool.start(0, count_from(1, 4));
  pool.start(1, count_from(11, 4));
  for (const int sequence : {0, 1}) {
    REQUIRE(manager.swap_out(Ids{sequence}));
    pool.execute_copies();
  }
  for (const int sequence : {0, 1}) {
    REQUIRE(manager.swap_in(Ids{sequence}));
    pool.execute_copies();
  }
  CHECK(pool.read(0) == count_from(1, 4));
  CHECK(pool.read(1) == count_from(11, 4));
}

TEST_CASE("swap: a block that is still to be copied to is copied out afterwards") {
  NumberPool pool(4, 2, 2);
  KvCacheManager& manager = pool.manager();
  pool.start(0, count_from(1, 3));
  manager.fork(0, 1);
  REQUIRE(manager.reserve(1, 1));  // plans the copy of the block that the two share, as 1 is to write to it
  REQUIRE(manager.swap_out(Ids{1}));
  pool.execute_copies();
  manager.free(0);
  REQUIRE(manager.swap_in(Ids{1}));
  pool.execute_copies();
  CHECK(pool.read(1) == count_from(1, 3));
}

TEST_CASE("swap: it is refused without a trace where there is no room, and host blocks can be freed") {
  KvCacheManager manager = tests::make_manager(4, 4, 2);
  REQUIRE(manager.allocate(0, 12));
  manager.commit(0, 12);
  const tests::Snapshot before = tests::take_snapshot(manager);
  CHECK_FALSE(manager.swap_out(Ids{0}));  // three blocks, and the host has two
  CHECK(tests::take_snapshot(manager) == before);
  CHECK(manager.pending_copies().empty());
  manager.free(0);
  REQUIRE(manager.allocate(1, 8));
  manager.commit(1, 8);
  REQUIRE(manager.swap_out(Ids{1}));
  REQUIRE(manager.allocate(2, 12));
  const tests::Snapshot full = tests::take_snapshot(manager);
  CHECK_FALSE(manager.swap_in(Ids{1}));
  CHECK(tests::take_snapshot(manager) == full);
  manager.free(1);
  CHECK(manager.num_free_host_blocks() == 2);
  CHECK_FALSE(manager.is_swapped(1));
}

TEST_CASE("swap: a block is copied out before another sequence writes to it (stage 8, invariant 6)") {
  NumberPool pool(2, 2, 2);
  KvCacheManager& manager = pool.manager();
  pool.start(0, count_from(1, 4));
  // In one step: 0 goes out, 1 takes its blocks, and only then are the copies carried out.
  REQUIRE(manager.swap_out(Ids{0}));
  REQUIRE(manager.allocate(1, 4));
  pool.execute_copies();
  pool.write(1, count_from(11, 4));
  // In one step: 1 ends, and 0 is swapped in to the blocks that 1 has written to.
  manager.free(1);
  REQUIRE(manager.swap_in(Ids{0}));
  pool.execute_copies();
  CHECK(pool.read(0) == count_from(1, 4));
}

TEST_CASE("swap: published blocks are found again once they are swapped in, and not while they are out") {
  KvCacheManager manager = tests::make_manager(4, 2, 4);
  const Tokens text = {5, 6, 7, 8, 9};
  REQUIRE(manager.allocate(0, text));
  manager.commit(0, text);
  REQUIRE(manager.swap_out(Ids{0}));
  // Another sequence needs all blocks, so that the cached blocks of the text are evicted.
  REQUIRE(manager.allocate(1, 8));
  manager.free(1);
  CHECK(manager.prefix_cache().find(text, 0).empty());
  REQUIRE(manager.swap_in(Ids{0}));
  CHECK(manager.prefix_cache().find(text, 0).size() == 2);
  CHECK(manager.prefix_cache().find(text, 0).front() == manager.block_table(0).front());
  CHECK(check_ledger(manager, 4, 2) == kNoProblem);
}

TEST_CASE("swap: what is published again has the salt that it had, also in a fork") {
  KvCacheManager manager = tests::make_manager(6, 2, 6);
  const Tokens text = {5, 6, 7, 8, 9};
  REQUIRE(manager.allocate(0, text, 7));
  manager.commit(0, text);
  manager.fork(0, 1);
  REQUIRE(manager.swap_out(Ids{0, 1}));
  // Another sequence needs all blocks, so that the cached blocks of the text are evicted.
  REQUIRE(manager.allocate(2, 12));
  manager.free(2);
  REQUIRE(manager.swap_in(Ids{0, 1}));
  CHECK(manager.prefix_cache().find(text, 7).size() == 2);
  CHECK(manager.prefix_cache().find(text, 0).empty());
  // And what is published after it: the third block is full, once the fork has a copy of its own.
  REQUIRE(manager.reserve(1, 1));
  manager.commit(1, Tokens{10});
  const Tokens longer = {5, 6, 7, 8, 9, 10};
  CHECK(manager.prefix_cache().find(longer, 7).size() == 3);
  CHECK(manager.prefix_cache().find(longer, 0).empty());
}

TEST_CASE("swap: a block that two sequences share is found again after each of them, if they come back apart") {
  KvCacheManager manager = tests::make_manager(6, 2, 4);
  const Tokens text = {5, 6, 7, 8, 9};
  REQUIRE(manager.allocate(0, text));
  manager.commit(0, text);
  manager.fork(0, 1);
  REQUIRE(manager.swap_out(Ids{0, 1}));
  for (const int sequence : {0, 1}) {
    CAPTURE(sequence);
    // Another sequence needs all blocks, so that the cached blocks of the text are evicted.
    REQUIRE(manager.allocate(7, 12));
    manager.free(7);
    CHECK(manager.prefix_cache().find(text, 0).empty());
    REQUIRE(manager.swap_in(Ids{sequence}));
    CHECK(manager.prefix_cache().find(text, 0).size() == 2);
    manager.free(sequence);
  }
  CHECK(manager.num_free_host_blocks() == 4);
  CHECK(check_ledger(manager, 6, 2) == kNoProblem);
}

TEST_CASE("swap: a host block is free when the last of its sequences has ended") {
  KvCacheManager manager = tests::make_manager(4, 4, 2);
  REQUIRE(manager.allocate(0, 8));
  manager.commit(0, 8);
  manager.fork(0, 1);
  REQUIRE(manager.swap_out(Ids{0, 1}));
  CHECK(manager.num_free_host_blocks() == 0);
  manager.free(0);
  CHECK(manager.num_free_host_blocks() == 0);
  manager.free(1);
  CHECK(manager.num_free_host_blocks() == 2);
}

TEST_CASE("swap: blocks that are reserved ahead are not moved") {
  KvCacheManager manager = tests::make_manager(6, 4, 2);
  REQUIRE(manager.allocate(0, 20));
  manager.commit(0, 6);
  REQUIRE(manager.swap_out(Ids{0}));
  CHECK(tests::take_copies(manager).size() == 2);
  CHECK(manager.free_blocks().size() == 6);
  REQUIRE(manager.swap_in(Ids{0}));
  CHECK(manager.capacity(0) == 8);
}

TEST_CASE("swap: what is swapped out keeps its cached blocks, and its last one is evicted first") {
  const Tokens text = {1, 2, 3, 4, 5, 6};
  KvCacheManager manager = tests::make_manager(4, 2, 4);
  REQUIRE(manager.allocate(0, text));
  manager.commit(0, text);
  const std::vector<int> table = manager.block_table(0);
  REQUIRE(manager.swap_out(Ids{0}));
  const auto& evictable = manager.prefix_cache().evictable();
  CHECK(std::vector<int>(evictable.begin(), evictable.end()) == std::vector<int>(table.rbegin(), table.rend()));
}

TEST_CASE("swap: a group comes back only if the spare blocks stay free") {
  KvCacheManager manager = tests::make_manager(5, 4, 2);
  REQUIRE(manager.allocate(0, 8));
  manager.commit(0, 8);
  REQUIRE(manager.swap_out(Ids{0}));
  const tests::Snapshot before = take_snapshot(manager);
  CHECK_FALSE(manager.swap_in(Ids{0}, 4));
  CHECK(take_snapshot(manager) == before);
  CHECK(manager.swap_in(Ids{0}, 3));
}

TEST_CASE("manager: max_reservable is the largest number with which reserve() succeeds") {
  for (int length = 1; length <= 9; ++length) {
    for (int num_taken = 0; num_taken < 4; ++num_taken) {
      for (const bool is_forked : {false, true}) {
        KvCacheManager manager = tests::make_manager(7, 4, 0);
        REQUIRE(manager.allocate(0, length + length % 3));  // sometimes with slots ahead
        manager.commit(0, length);
        if (is_forked) {
          manager.fork(0, 1);
        }
        for (int i = 0; i < num_taken; ++i) {
          REQUIRE(manager.allocate(2 + i, 4));
        }
        CAPTURE(length, num_taken, is_forked);
        const int most = manager.max_reservable(0);
        CHECK_FALSE(manager.can_reserve(Ids{0}, most + 1));
        CHECK(manager.reserve(0, most));
      }
    }
  }
}
