// The manager and the cache as soon as sequences share blocks: forks, copies before writes, exact frees. Compiled once
// for each stage, from the fifth on.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/math/sampling.h"
#include "tests/stages/number_pool.h"
#include "tests/support/attention_inputs.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

// clang-format off
#include STAGE_HEADER(demo/sampling_commands.h)
// clang-format on

using common::CheckError;
using stage::BlockCopy;
using stage::KvCacheManager;
using tests::Copies;
using tests::count_from;
using tests::joined;
using tests::NumberPool;
using tests::Numbers;
using tests::pairs;
using tests::Snapshot;
using tests::take_snapshot;

namespace {

const std::string kNoProblem;

}  // namespace

TEST_CASE("fork: both sequences own the blocks, none is taken and no float moves (stage 5, invariants 1 and 2)") {
  for (const int length : {0, 1, 3, 4, 6, 8, 11}) {
    CAPTURE(length);
    NumberPool pool(8, 4);
    pool.start(7, count_from(1, 1));  // so that the tables do not begin with block 0
    REQUIRE(pool.manager().allocate(0, 1));
    REQUIRE(pool.append(0, count_from(10, length)));
    const Snapshot before = take_snapshot(pool.manager());
    const Numbers floats = pool.all();
    pool.manager().fork(0, 1);
    pool.manager().fork(1, 2);

    CHECK(pool.all() == floats);
    CHECK(pool.manager().pending_copies().empty());
    CHECK(pool.manager().free_blocks() == before.free_blocks);
    for (const int child : {1, 2}) {
      CHECK(pool.manager().length(child) == length);
      CHECK(pool.read(child) == count_from(10, length));
      std::vector<int> with_tokens = pool.manager().block_table(0);
      with_tokens.resize(static_cast<std::size_t>((length + 3) / 4));
      CHECK(pool.manager().block_table(child) == with_tokens);
      for (const int block : with_tokens) {
        CHECK(pool.manager().reference_count(block) == 3);
      }
    }
    CHECK(pool.ledger() == kNoProblem);
  }
}

TEST_CASE("write: of N owners the first N - 1 copy, and the last one writes in place (stage 5, invariants 3 and 4)") {
  for (int block_size = 2; block_size <= 5; ++block_size) {
    for (int length = 1; length <= 2 * block_size; ++length) {
      for (int num_owners = 1; num_owners <= 4; ++num_owners) {
        CAPTURE(block_size, length, num_owners);
        NumberPool pool(12, block_size);
        pool.start(0, count_from(1, length));
        for (int child = 1; child < num_owners; ++child) {
          pool.manager().fork(child - 1, child);
        }
        const std::vector<int> table = pool.manager().block_table(0);
        const bool is_partial = length % block_size != 0;
        // The parent neither first nor last.
        for (int i = 0; i < num_owners; ++i) {
          const int sequence = (i + 1) % num_owners;
          const bool is_last = i == num_owners - 1;
          REQUIRE(pool.manager().reserve(sequence, 1));
          const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
          const std::vector<int> written_to = pool.manager().block_table(sequence);
          if (is_partial && !is_last) {
            REQUIRE(copies.size() == 1);
            CHECK(copies[0].source == table.back());
            CHECK(copies[0].destination == written_to.back());
          } else {
            CHECK(copies.empty());
            CHECK(std::equal(table.begin(), table.end(), written_to.begin()));
          }
          pool.execute(copies);
          pool.write(sequence, count_from(100 * (sequence + 1), 1));
          CHECK(pool.ledger() == kNoProblem);
        }
        for (int sequence = 0; sequence < num_owners; ++sequence) {
          CHECK(pool.read(sequence) == joined(count_from(1, length), count_from(100 * (sequence + 1), 1)));
        }
      }
    }
  }
}

TEST_CASE("fork: blocks that the parent has reserved ahead stay its own") {
  NumberPool pool(6, 4);
  REQUIRE(pool.manager().allocate(0, 11));
  pool.write(0, count_from(1, 5));
  pool.manager().fork(0, 1);
  CHECK(pool.manager().block_table(0) == std::vector<int>{0, 1, 2});
  CHECK(pool.manager().block_table(1) == std::vector<int>{0, 1});
  CHECK(pool.manager().reference_count(1) == 2);
  CHECK(pool.manager().reference_count(2) == 1);
  CHECK(pool.manager().length(1) == 5);
  CHECK(pool.ledger() == kNoProblem);
}

TEST_CASE("reserve: a shared partly filled block is copied, and one reserved ahead is used as it is") {
  NumberPool pool(6, 4);
  REQUIRE(pool.manager().allocate(0, 11));
  pool.write(0, count_from(1, 5));
  pool.manager().fork(0, 1);
  REQUIRE(pool.manager().reserve(0, 6));
  CHECK(pairs(tests::take_copies(pool.manager())) == Copies{{1, 3}});
  CHECK(pool.manager().block_table(0) == std::vector<int>{0, 3, 2});
  CHECK(pool.ledger() == kNoProblem);
}

TEST_CASE("free: exactly the private blocks are returned, whatever the order (stage 5, invariant 6)") {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    NumberPool pool(16, 3);
    pool.start(0, count_from(1, 7));
    pool.manager().fork(0, 1);
    REQUIRE(pool.append(1, count_from(50, 4)));
    pool.manager().fork(1, 2);
    pool.manager().fork(0, 3);
    REQUIRE(pool.append(2, count_from(70, 1)));
    REQUIRE(pool.append(0, count_from(90, 3)));
    for (const int sequence : order) {
      CAPTURE(order, sequence);
      const Snapshot before = take_snapshot(pool.manager());
      std::set<int> expected(before.free_blocks.begin(), before.free_blocks.end());
      for (const int block : before.sequences.at(sequence).block_table) {
        if (before.reference_counts[static_cast<std::size_t>(block)] == 1) {
          expected.insert(block);
        }
      }
      pool.manager().free(sequence);
      const std::vector<int>& free_blocks = pool.manager().free_blocks();
      CHECK(std::set<int>(free_blocks.begin(), free_blocks.end()) == expected);
      CHECK(pool.ledger() == kNoProblem);
      for (const int left : pool.manager().sequences()) {
        CHECK(pool.manager().block_table(left) == before.sequences.at(left).block_table);
        CHECK(pool.read(left).size() == static_cast<std::size_t>(before.sequences.at(left).length));
      }
    }
    CHECK(pool.num_free() == 16);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("manager: misuse of forks is noticed and changes nothing (stage 5, invariant 7)") {
  NumberPool pool(5, 4);
  KvCacheManager& manager = pool.manager();
  pool.start(0, count_from(1, 6));
  manager.fork(0, 1);
  manager.fork(0, 2);
  manager.free(2);
  const Snapshot before = take_snapshot(manager);
  CHECK_THROWS_AS(manager.fork(0, 0), CheckError);
  CHECK_THROWS_AS(manager.fork(0, 1), CheckError);
  CHECK_THROWS_AS(manager.fork(2, 3), CheckError);
  CHECK_THROWS_AS(manager.fork(9, 3), CheckError);
  CHECK_FALSE(manager.contains(3));
  CHECK_THROWS_AS(manager.free(2), CheckError);
  CHECK_THROWS_AS(manager.reserve(2, 1), CheckError);
  CHECK_THROWS_AS(manager.can_reserve(std::vector<int>{0, 2}, 1), CheckError);
  CHECK_THROWS_AS(manager.commit(0, 3), CheckError);
  CHECK_THROWS_AS(manager.commit(0, 1), CheckError);  // into a block that sequence 1 reads too
  CHECK(take_snapshot(manager) == before);
  CHECK(manager.pending_copies().empty());
  CHECK(pool.ledger() == kNoProblem);
  manager.fork(0, 2);  // the id can be used again
  CHECK(pool.read(2) == count_from(1, 6));
}

TEST_CASE("manager: a write that finds no block for its copy is refused without a trace (stage 5, invariant 7)") {
  NumberPool pool(3, 4);
  pool.start(0, count_from(1, 6));
  pool.manager().fork(0, 1);
  pool.start(2, count_from(30, 4));
  const Snapshot before = take_snapshot(pool.manager());
  const Numbers floats = pool.all();
  for (const int sequence : {0, 1}) {
    CHECK_FALSE(pool.manager().reserve(sequence, 1));
    CHECK_FALSE(pool.manager().can_reserve(std::vector<int>{sequence}, 1));
    CHECK(pool.manager().reserve(sequence, 0));
  }
  CHECK(take_snapshot(pool.manager()) == before);
  CHECK(pool.manager().pending_copies().empty());
  CHECK(pool.all() == floats);

  SECTION("a block is freed: the copy goes there") {
    pool.manager().free(2);
    REQUIRE(pool.append(1, count_from(50, 1)));
    CHECK(pool.read(1) == joined(count_from(1, 6), count_from(50, 1)));
    CHECK(pool.read(0) == count_from(1, 6));
  }
  SECTION("the other owner is freed: no copy is needed") {
    pool.manager().free(0);
    REQUIRE(pool.append(1, count_from(50, 1)));
    CHECK(pool.manager().block_table(1) == std::vector<int>{0, 1});
    CHECK(pool.read(1) == joined(count_from(1, 6), count_from(50, 1)));
  }
  CHECK(pool.ledger() == kNoProblem);
}

TEST_CASE("copies: several are planned before any is carried out (stage 5, invariant 5)") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 6));
  for (const int child : {1, 2, 3}) {
    pool.manager().fork(0, child);
  }
  for (const int sequence : {0, 1, 2, 3}) {
    REQUIRE(pool.manager().reserve(sequence, 1));
  }
  CHECK(pool.manager().reserve(0, 1));  // again: it has its own block by now
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 2}, {1, 3}, {1, 4}});
  CHECK(pool.manager().pending_copies().empty());
  pool.execute(copies);
  for (const int sequence : {3, 2, 1, 0}) {
    pool.write(sequence, count_from(100 * (sequence + 1), 1));
  }
  for (const int sequence : {0, 1, 2, 3}) {
    CHECK(pool.read(sequence) == joined(count_from(1, 6), count_from(100 * (sequence + 1), 1)));
  }
}

TEST_CASE("copies: they stay pending until they have been carried out, and more are planned behind them") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 6));
  pool.manager().fork(0, 1);
  REQUIRE(pool.manager().reserve(1, 1));
  const std::span<const BlockCopy> pending = pool.manager().pending_copies();
  CHECK(pairs({pending.begin(), pending.end()}) == Copies{{1, 2}});  // a copy that throws here is tried again
  pool.manager().fork(0, 2);
  REQUIRE(pool.manager().reserve(2, 1));
  CHECK(pairs(tests::take_copies(pool.manager())) == Copies{{1, 2}, {1, 3}});
  CHECK(pool.manager().pending_copies().empty());
}

TEST_CASE("copies: a sequence whose copy is still planned is forked, and its child writes (stage 5, invariant 5)") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 6));
  pool.manager().fork(0, 1);
  REQUIRE(pool.manager().reserve(1, 1));
  pool.manager().fork(1, 2);
  REQUIRE(pool.manager().reserve(2, 1));
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 2}, {2, 3}});  // a chain: the second copies what the first has put there
  pool.execute(copies);
  for (const int sequence : {0, 1, 2}) {
    pool.write(sequence, count_from(100 * (sequence + 1), 2));
  }
  for (const int sequence : {0, 1, 2}) {
    CHECK(pool.read(sequence) == joined(count_from(1, 6), count_from(100 * (sequence + 1), 2)));
  }
}

TEST_CASE("copies: a source is freed and becomes the destination of a later copy (stage 5, invariant 5)") {
  NumberPool pool(5, 4);
  pool.start(0, count_from(1, 6));   // blocks 0 and 1
  pool.start(5, count_from(61, 3));  // block 2
  pool.manager().fork(0, 1);
  pool.manager().fork(5, 6);
  REQUIRE(pool.manager().reserve(0, 1));  // block 1 to block 3
  pool.manager().free(1);                 // the last owner of block 1, which is to be copied yet
  REQUIRE(pool.manager().reserve(6, 1));  // block 2 to block 1
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 3}, {2, 1}});
  pool.execute(copies);
  pool.write(0, count_from(7, 1));
  pool.write(6, count_from(80, 1));
  CHECK(pool.read(0) == count_from(1, 7));
  CHECK(pool.read(5) == count_from(61, 3));
  CHECK(pool.read(6) == joined(count_from(61, 3), count_from(80, 1)));
  CHECK(pool.ledger() == kNoProblem);
}

TEST_CASE("copies: a destination is freed and used for another copy (stage 5, invariant 5)") {
  NumberPool pool(5, 4);
  pool.start(0, count_from(1, 6));
  pool.start(5, count_from(61, 3));
  pool.manager().fork(0, 1);
  pool.manager().fork(5, 6);
  REQUIRE(pool.manager().reserve(0, 1));  // block 1 to block 3
  pool.manager().free(0);
  REQUIRE(pool.manager().reserve(6, 1));  // block 2 to block 3
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 3}, {2, 3}});
  pool.execute(copies);
  pool.write(6, count_from(64, 1));
  CHECK(pool.read(6) == count_from(61, 4));
  CHECK(pool.read(1) == count_from(1, 6));
}

TEST_CASE("copies: K and V of all layers and heads are copied, and nothing else is touched") {
  const tests::AttentionShape shape{4, 2, 3, 2};
  stage::KvCache cache(tests::cache_shape(shape, 4, 2));
  std::vector<int> slots(8);
  std::iota(slots.begin(), slots.end(), 0);
  common::Random random(1);
  const tests::TokenInputs rows = tests::random_inputs(shape, 8, random);
  for (int layer = 0; layer < 2; ++layer) {
    const auto& [q, k, v] = rows[static_cast<std::size_t>(layer)];
    cache.write(layer, slots, k, v);
  }
  cache.copy_blocks(std::vector<BlockCopy>{{2, 0}});
  for (int layer = 0; layer < 2; ++layer) {
    const auto& [q, k, v] = rows[static_cast<std::size_t>(layer)];
    for (int head = 0; head < 2; ++head) {
      for (const int slot : slots) {
        CAPTURE(layer, head, slot);
        const int row = slot < 2 ? slot + 4 : slot;  // block 0 is slots 0 and 1, block 2 is slots 4 and 5
        CHECK(cache.keys(layer, head, slot, 1) == k.block(row, Eigen::Index{head} * 3, 1, 3));
        CHECK(cache.values(layer, head, slot, 1) == v.block(row, Eigen::Index{head} * 3, 1, 3));
      }
    }
  }
}

TEST_CASE("can_reserve: N writers of a shared block need N - 1 blocks, and one each where they grow") {
  for (int num_owners = 1; num_owners <= 4; ++num_owners) {
    for (int num_writers = 1; num_writers <= num_owners; ++num_writers) {
      for (int num_free = 0; num_free <= 8; ++num_free) {
        KvCacheManager manager = tests::make_manager(2 + num_free, 4);
        REQUIRE(manager.allocate(0, 6));
        manager.commit(0, 6);
        std::vector<int> writers;
        for (int sequence = 0; sequence < num_owners; ++sequence) {
          if (sequence > 0) {
            manager.fork(0, sequence);
          }
          if (sequence < num_writers) {
            writers.push_back(sequence);
          }
        }
        CAPTURE(num_owners, num_writers, num_free);
        const int copies = std::min(num_writers, num_owners - 1);
        CHECK(manager.can_reserve(writers, 0));
        CHECK(manager.can_reserve(writers, 2) == (copies <= num_free));
        CHECK(manager.can_reserve(writers, 3) == (copies + num_writers <= num_free));
        CHECK_FALSE(manager.can_reserve(writers, std::numeric_limits<int>::max()));
      }
    }
  }
}

// ---- Figures that circulate, and what they are (ERRATA) ------------------------------------------------------------

TEST_CASE("figures: a sequence that is still live and its four forks are five owners") {
  KvCacheManager manager = tests::make_manager(16, 16);
  REQUIRE(manager.allocate(0, 64));
  manager.commit(0, 64);
  for (const int child : {1, 2, 3, 4}) {
    manager.fork(0, child);
  }
  for (const int block : manager.block_table(0)) {
    CHECK(manager.reference_count(block) == 5);
  }
  manager.free(0);
  CHECK(manager.reference_count(manager.block_table(1).front()) == 4);
  CHECK(manager.usage().reserved == 64);
}

TEST_CASE("figures: after tokens 0 to 10 the next one goes to slot 11 of a shared partial block") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 11));
  for (const int child : {1, 2, 3}) {
    pool.manager().fork(0, child);
  }
  CHECK(pool.manager().slots(3, 10, 1) == std::vector<int>{10});
  Copies copies;
  for (const int sequence : {0, 1, 2, 3}) {
    REQUIRE(pool.manager().reserve(sequence, 1));
    for (const auto& copy : pairs(tests::take_copies(pool.manager()))) {
      copies.push_back(copy);
    }
  }
  CHECK(copies == Copies{{2, 3}, {2, 4}, {2, 5}});
  CHECK(pool.manager().slots(3, 11, 1) == std::vector<int>{11});
}

TEST_CASE("figures: 64 tokens and 4 beams of 50 more, or of 10 more") {
  for (const int more : {0, 10, 50}) {
    KvCacheManager manager = tests::make_manager(64, 16);
    REQUIRE(manager.allocate(0, 64));
    manager.commit(0, 64);
    for (const int child : {1, 2, 3}) {
      manager.fork(0, child);
    }
    for (int token = 0; token < more; ++token) {
      for (const int sequence : {0, 1, 2, 3}) {
        REQUIRE(manager.reserve(sequence, 1));
        manager.commit(sequence, 1);
      }
    }
    CHECK(manager.pending_copies().empty());  // 64 tokens fill their blocks
    const stage::SharingFigures figures = stage::sharing_figures(manager);
    CAPTURE(more);
    // 4 blocks of the prompt, and for each beam 1 block for 10 tokens or 4 for 50.
    CHECK(figures.blocks == (more == 0 ? 4 : more == 10 ? 8 : 20));
    CHECK(figures.separate_blocks == (more == 0 ? 16 : more == 10 ? 20 : 32));
    CHECK(figures.slots == 64 + 4 * more);
    CHECK(figures.separate_slots == 4 * (64 + more));
  }
}

TEST_CASE("figures: 100 users share 512 tokens and add 200 each") {
  KvCacheManager manager = tests::make_manager(1332, 16);
  REQUIRE(manager.allocate(0, 512));
  manager.commit(0, 512);
  for (int user = 1; user < 100; ++user) {
    manager.fork(0, user);
  }
  for (int user = 0; user < 100; ++user) {
    REQUIRE(manager.reserve(user, 200));
    manager.commit(user, 200);
  }
  const stage::SharingFigures figures = stage::sharing_figures(manager);
  CHECK(figures.blocks == 1332);
  CHECK(figures.separate_blocks == 4500);
  CHECK(manager.free_blocks().empty());
}

// ---- Every allocation fails once -----------------------------------------------------------------------------------

TEST_CASE("a fixed scenario in pools of 1, 2, 3 … blocks: whichever block is missing, a refusal changes nothing") {
  constexpr int kBlockSize = 3;
  std::set<std::size_t> stopped_at;
  bool done = false;
  for (int num_blocks = 1; !done; ++num_blocks) {
    REQUIRE(num_blocks < 40);
    NumberPool pool(num_blocks, kBlockSize);
    KvCacheManager& manager = pool.manager();
    const auto append = [&](int sequence, int first, int count) {
      return [&pool, sequence, first, count] { return pool.append(sequence, count_from(first, count)); };
    };
    const auto fork = [&](int parent, int child) {
      return [&manager, parent, child] {
        manager.fork(parent, child);
        return true;
      };
    };
    const std::vector<std::function<bool()>> steps = {[&] { return manager.allocate(0, 2); },
                                                      append(0, 1, 4),
                                                      append(0, 5, 3),
                                                      fork(0, 1),
                                                      fork(0, 2),
                                                      append(1, 100, 1),  // a copy
                                                      append(0, 200, 4),  // a copy and a new block
                                                      append(2, 300, 3),  // in place, and a new block
                                                      fork(1, 3),
                                                      [&] {
                                                        manager.free(2);
                                                        return true;
                                                      },
                                                      append(3, 400, 1),
                                                      append(1, 500, 5),
                                                      [&] { return manager.allocate(4, 7); }};
    done = true;
    for (std::size_t i = 0; i < steps.size() && done; ++i) {
      const Snapshot before = take_snapshot(manager);
      const Numbers floats = pool.all();
      CAPTURE(num_blocks, i);
      if (!steps[i]()) {
        CHECK(take_snapshot(manager) == before);
        CHECK(manager.pending_copies().empty());
        CHECK(pool.all() == floats);
        stopped_at.insert(i);
        done = false;
      }
      CHECK(pool.ledger() == kNoProblem);
    }
    if (done) {
      CHECK(pool.read(0) == joined(count_from(1, 7), count_from(200, 4)));
      CHECK(pool.read(1) == joined(joined(count_from(1, 7), count_from(100, 1)), count_from(500, 5)));
      CHECK(pool.read(3) == joined(joined(count_from(1, 7), count_from(100, 1)), count_from(400, 1)));
    }
    for (const int sequence : manager.sequences()) {
      manager.free(sequence);
    }
    CHECK(pool.num_free() == num_blocks);
  }
  CHECK(stopped_at.size() >= 6);
}
